{{/* Names, labels, images: what many objects have. */}}

{{- define "backhaul.roles" -}}prefill decode encode{{- end }}

{{- define "backhaul.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 43 | trimSuffix "-" }}
{{- end }}

{{/* Short enough that what is put behind it fits into a label. */}}
{{- define "backhaul.fullname" -}}
{{- $name := include "backhaul.name" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 43 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 43 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 43 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "backhaul.serviceAccountName" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}{{ include "backhaul.fullname" . }}-router
{{- else }}default
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "component" NAME): what selectors have, and what never changes. */}}
{{- define "backhaul.selectorLabels" -}}
app.kubernetes.io/name: {{ include "backhaul.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "backhaul.labels" -}}
{{ include "backhaul.selectorLabels" . }}
app.kubernetes.io/part-of: backhaul
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "component" NAME "block" VALUES): labels of pods. Without versions: a new one of the chart alone
must not have models loaded again. */}}
{{- define "backhaul.podLabels" -}}
{{ include "backhaul.selectorLabels" . }}
app.kubernetes.io/part-of: backhaul
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with .block.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "component" NAME "name" NAME): metadata of an object. */}}
{{- define "backhaul.metadata" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "backhaul.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "image" IMAGE "repository" DEFAULT "tag" DEFAULT). */}}
{{- define "backhaul.image" -}}
{{- $repository := .image.repository | default .repository }}
{{- with .root.Values.global.imageRegistry }}{{ $repository = printf "%s/%s" . $repository }}{{ end }}
{{- if .image.digest }}{{ $repository }}@{{ .image.digest }}
{{- else }}{{ $repository }}:{{ .image.tag | default .tag }}
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "block" VALUES "component" NAME "zones" BOOL): where pods run. */}}
{{- define "backhaul.placement" -}}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .block.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if kindIs "slice" .block.topologySpreadConstraints }}
{{- with .block.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- else }}
topologySpreadConstraints:
  {{- range ternary (list "kubernetes.io/hostname" "topology.kubernetes.io/zone") (list "kubernetes.io/hostname") .zones }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "backhaul.selectorLabels" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "component" NAME "kind" KIND "apiVersion" V "block" VALUES): an HPA or a ScaledObject. */}}
{{- define "backhaul.autoscaler" -}}
{{- $name := printf "%s-%s" (include "backhaul.fullname" .root) .component }}
{{- $scaling := .block.autoscaling }}
{{- $keda := deepCopy $scaling.keda }}
{{- with $scaling.behavior }}
{{- $keda = mergeOverwrite $keda (dict "advanced" (dict "horizontalPodAutoscalerConfig" (dict "behavior" .))) }}
{{- end }}
{{- if eq $scaling.type "keda" }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "backhaul.metadata" (dict "root" .root "component" .component "name" $name) | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: {{ .apiVersion }}, kind: {{ .kind }}, name: {{ $name }}}
  minReplicaCount: {{ $scaling.min }}
  maxReplicaCount: {{ $scaling.max }}
  {{- with $keda }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  triggers:
    {{- tpl (toYaml $scaling.triggers) .root | nindent 4 }}
{{- else }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "backhaul.metadata" (dict "root" .root "component" .component "name" $name) | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: {{ .apiVersion }}, kind: {{ .kind }}, name: {{ $name }}}
  minReplicas: {{ $scaling.min }}
  maxReplicas: {{ $scaling.max }}
  metrics:
    {{- toYaml $scaling.metrics | nindent 4 }}
  {{- with $scaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Of (dict "root" $ "component" NAME "block" VALUES): a PodDisruptionBudget. */}}
{{- define "backhaul.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "backhaul.metadata" (dict "root" .root "component" .component "name" (printf "%s-%s" (include "backhaul.fullname" .root) .component)) | nindent 2 }}
spec:
  maxUnavailable: {{ .block.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "backhaul.selectorLabels" . | nindent 6 }}
{{- end }}

{{/* Seconds before SIGTERM, of (dict "pool" POOL "role" ROLE). vLLM does not wait for the readers of its blocks, so
prefill must be left alive until the leases it gave have ended. */}}
{{- define "backhaul.poolPreStop" -}}
{{- if not (kindIs "invalid" .pool.preStopSeconds) }}{{ int .pool.preStopSeconds }}
{{- else if and (eq .pool.engine "vllm") (eq .role "prefill") }}{{ add (ceil .pool.kvTransfer.leaseSeconds | int) 5 }}
{{- else }}5
{{- end }}
{{- end }}

{{/* Of (dict "given" SECONDS "needed" SECONDS "where" KEY): the grace period, which must be enough. */}}
{{- define "backhaul.grace" -}}
{{- if kindIs "invalid" .given }}{{ add .needed 15 }}
{{- else if lt (int .given) (add (int .needed) 5 | int) }}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d is less than what preStop and drain take (%d) and 5 s" .where (int .given) (int .needed)) }}
{{- else }}{{ int .given }}
{{- end }}
{{- end }}

{{- define "backhaul.preStop" -}}
{{- if gt (int .) 0 }}
lifecycle:
  preStop:
    sleep: {seconds: {{ int . }}}
{{- end }}
{{- end }}
