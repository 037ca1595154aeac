{{/* The pods of a pool. All of (dict "root" $ "role" ROLE "pool" POOL "name" NAME). */}}

{{- define "backhaul.engineConfig" -}}
{{- $pool := .pool }}
{{- $kv := $pool.kvTransfer }}
{{- $config := dict "role" .role "model" $pool.model "host" "0.0.0.0" "port" (int $pool.port) "log_format" "json" }}
{{- $_ := set $config "require_routable_host" true }}
{{- $_ := set $config "device" (ternary "cuda" "cpu" (gt (int $pool.accelerator.count) 0)) }}
{{- $_ := set $config "drain_timeout" $pool.drain.timeoutSeconds }}
{{- with $pool.servedModelName }}
{{- $_ := set $config "served_model_name" . }}
{{- end }}
{{- if .root.Values.sealKeySecret.name }}
{{- $_ := set $config "seal_key_file" "/etc/backhaul/seal/key" }}
{{- end }}
{{- if ne .role "encode" }}
{{- $extra := dict "bidirectional_kv_xfer" $kv.bidirectional "kv_recompute_threshold" (int $kv.recomputeThreshold) }}
{{- $extra = merge $extra (dict "kv_lease_duration" $kv.leaseSeconds "decoder_kv_blocks_ttl" $kv.ttlSeconds) }}
{{- $_ := set $config "kv_transfer_config" (dict "kv_connector_extra_config" $extra) }}
{{- end }}
{{- toYaml (mergeOverwrite $config $pool.config) }}
{{- end }}

{{/* vLLM's --kv-transfer-config. Without an accelerator its blocks are in the host's memory. */}}
{{- define "backhaul.vllmTransfer" -}}
{{- $kv := .pool.kvTransfer }}
{{- $extra := dict "bidirectional_kv_xfer" $kv.bidirectional "kv_lease_duration" (int $kv.leaseSeconds) }}
{{- if eq .role "decode" }}
{{- $_ := set $extra "decoder_kv_blocks_ttl" (int $kv.ttlSeconds) }}
{{- else }}
{{- $_ := set $extra "kv_recompute_threshold" (int $kv.recomputeThreshold) }}
{{- end }}
{{- $config := dict "kv_connector" "NixlConnector" "kv_role" "kv_both" "kv_load_failure_policy" "fail" "kv_connector_extra_config" $extra }}
{{- if eq (int .pool.accelerator.count) 0 }}
{{- $_ := set $config "kv_buffer_device" "cpu" }}
{{- end }}
{{- toJson $config }}
{{- end }}

{{/* vLLM's --ec-transfer-config, or nothing: encoders announce encodings, and who prefills fetches them. */}}
{{- define "backhaul.vllmEncodings" -}}
{{- $pools := .root.Values.pools }}
{{- $encode := or (mergeOverwrite (deepCopy $pools.common) (deepCopy $pools.encode)).enabled .root.Values.router.encode }}
{{- $prefill := or (mergeOverwrite (deepCopy $pools.common) (deepCopy $pools.prefill)).enabled .root.Values.router.prefill }}
{{- $role := "" }}
{{- if eq .role "encode" }}
{{- $role = "ec_producer" }}
{{- else if and $encode (or (eq .role "prefill") (not $prefill)) }}
{{- $role = "ec_consumer" }}
{{- end }}
{{- if $role }}
{{- toJson (dict "ec_connector" "ECCPUConnector" "ec_role" $role "ec_connector_extra_config" (dict "ec_enable_nixl" true)) }}
{{- end }}
{{- end }}

{{- define "backhaul.vllmArgs" -}}
{{- $pool := .pool }}
- {{ $pool.model | quote }}
- --port={{ int $pool.port }}
{{- with $pool.servedModelName }}
- --served-model-name={{ . }}
{{- end }}
- --shutdown-timeout={{ ceil $pool.drain.timeoutSeconds | int }}
{{- if gt (int $pool.parallelism.tensor) 1 }}
- --tensor-parallel-size={{ int $pool.parallelism.tensor }}
{{- end }}
{{- if gt (int $pool.parallelism.pipeline) 1 }}
- --pipeline-parallel-size={{ int $pool.parallelism.pipeline }}
{{- end }}
{{- if gt (int $pool.parallelism.data) 1 }}
- --data-parallel-size={{ int $pool.parallelism.data }}
{{- end }}
{{- if gt (int $pool.parallelism.nodes) 1 }}
- --nnodes=$(LWS_GROUP_SIZE)
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
{{- if .worker }}
- --headless
{{- end }}
{{- end }}
{{- if ne .role "encode" }}
- {{ printf "--kv-transfer-config=%s" (include "backhaul.vllmTransfer" .) | squote }}
{{- end }}
{{- with include "backhaul.vllmEncodings" . }}
- {{ printf "--ec-transfer-config=%s" . | squote }}
{{- end }}
{{- end }}

{{- define "backhaul.engineEnv" -}}
{{- $pool := .pool }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /cache}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: USER, value: backhaul}
- {name: PYTHONHASHSEED, value: "0"}
- {name: UCX_TCP_PORT_RANGE, value: "{{ int $pool.kvTransfer.ucx.firstPort }}-{{ int $pool.kvTransfer.ucx.lastPort }}"}
{{- with $pool.kvTransfer.ucx.tls }}
- {name: UCX_TLS, value: {{ . | quote }}}
{{- end }}
{{- with $pool.kvTransfer.ucx.netDevices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
{{- if eq $pool.engine "vllm" }}
{{- $channel := ternary "EC" "NIXL" (eq .role "encode") }}
- name: VLLM_{{ $channel }}_SIDE_CHANNEL_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: VLLM_{{ $channel }}_SIDE_CHANNEL_PORT, value: "{{ int $pool.kvTransfer.sideChannelPort }}"}
{{- end }}
{{- if $pool.apiKeySecret.name }}
- name: VLLM_API_KEY
  valueFrom: {secretKeyRef: {name: {{ $pool.apiKeySecret.name }}, key: {{ $pool.apiKeySecret.key }}}}
{{- end }}
{{- if $pool.hfTokenSecret.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $pool.hfTokenSecret.name }}, key: {{ $pool.hfTokenSecret.key }}}}
{{- end }}
{{- with $pool.extraEnv }}
{{ tpl (toYaml .) $.root }}
{{- end }}
{{- end }}

{{/* What the engine has, with accelerators and RDMA as requests and limits. */}}
{{- define "backhaul.engineResources" -}}
{{- $devices := dict }}
{{- range list .pool.accelerator .pool.rdma }}
{{- if gt (int .count) 0 }}
{{- $_ := set $devices (required "rdma.resource: say which" .resource) (toString (int .count)) }}
{{- end }}
{{- end }}
{{- $resources := deepCopy .pool.resources }}
{{- if $devices }}
{{- $resources = mergeOverwrite $resources (dict "requests" $devices "limits" (deepCopy $devices)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "backhaul.engineSecurity" -}}
{{- $context := deepCopy .pool.securityContext }}
{{- if .pool.ipcLock }}
{{- $context = mergeOverwrite $context (dict "capabilities" (dict "add" (list "IPC_LOCK"))) }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{- define "backhaul.poolPod" -}}
{{- $pool := .pool }}
{{- $vllm := eq $pool.engine "vllm" }}
{{- $me := dict "root" .root "component" .role "block" $pool "zones" false }}
{{- $variant := ternary "cuda" "cpu" (gt (int $pool.accelerator.count) 0) }}
{{- $repository := ternary "vllm/vllm-openai" "backhaul-engine" $vllm }}
{{- $tag := ternary "v0.33.0" (printf "%s-%s" .root.Chart.AppVersion $variant) $vllm }}
{{- $preStop := include "backhaul.poolPreStop" . | int }}
{{- $stopping := add $preStop (ceil $pool.drain.timeoutSeconds | int) }}
{{- $seal := and (not $vllm) .root.Values.sealKeySecret.name }}
metadata:
  labels:
    {{- include "backhaul.podLabels" $me | nindent 4 }}
  {{- if or (not $vllm) $pool.podAnnotations }}
  annotations:
    {{- if not $vllm }}
    checksum/config: {{ include "backhaul.engineConfig" . | sha256sum }}
    {{- end }}
    {{- with $pool.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "backhaul.grace" (dict "given" $pool.terminationGracePeriodSeconds "needed" $stopping "where" (printf "pools.%s" .role)) }}
  {{- if $pool.hostIPC }}
  hostIPC: true
  {{- end }}
  securityContext:
    {{- toYaml $pool.podSecurityContext | nindent 4 }}
  {{- include "backhaul.placement" $me | trim | nindent 2 }}
  containers:
    - name: engine
      image: {{ include "backhaul.image" (dict "root" .root "image" $pool.image "repository" $repository "tag" $tag) }}
      imagePullPolicy: {{ $pool.image.pullPolicy }}
      {{- if $vllm }}
      command: [vllm, serve]
      {{- else }}
      command: [backhaul]
      {{- end }}
      args:
        {{- if $vllm }}
        {{- include "backhaul.vllmArgs" . | trim | nindent 8 }}
        {{- else }}
        - engine
        - --config=/etc/backhaul/config/engine.yaml
        - --advertise-host=$(POD_IP)
        {{- end }}
        {{- with $pool.extraArgs }}
        {{- tpl (toYaml .) $.root | nindent 8 }}
        {{- end }}
      env:
        {{- include "backhaul.engineEnv" . | trim | nindent 8 }}
      ports:
        - {name: http, containerPort: {{ int $pool.port }}}
        {{- if $vllm }}
        - {name: nixl, containerPort: {{ int $pool.kvTransfer.sideChannelPort }}}
        {{- end }}
      {{- if not .worker }}
      startupProbe:
        {{- toYaml $pool.probes.startup | nindent 8 }}
      livenessProbe:
        {{- toYaml $pool.probes.liveness | nindent 8 }}
      readinessProbe:
        {{- toYaml $pool.probes.readiness | nindent 8 }}
      {{- end }}
      {{- include "backhaul.preStop" $preStop | trim | nindent 6 }}
      resources:
        {{- include "backhaul.engineResources" . | nindent 8 }}
      securityContext:
        {{- include "backhaul.engineSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /cache}
        {{- if not $vllm }}
        - {name: config, mountPath: /etc/backhaul/config, readOnly: true}
        {{- end }}
        {{- if $seal }}
        - {name: seal, mountPath: /etc/backhaul/seal, readOnly: true}
        {{- end }}
        {{- if $pool.modelVolume }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $pool.shmSize }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - name: cache
      {{- toYaml $pool.cacheVolume | nindent 6 }}
    {{- if not $vllm }}
    - {name: config, configMap: {name: {{ .name }}}}
    {{- end }}
    {{- if $seal }}
    {{- with .root.Values.sealKeySecret }}
    - {name: seal, secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: key}]}}
    {{- end }}
    {{- end }}
    {{- with $pool.modelVolume }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $pool.shmSize }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
    {{- end }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
