{{/* The router's settings. */}}

{{/* Of (dict "root" $ "role" ROLE "pool" POOL): what names the engines of a pool, as for --prefill. The namespace is
left out: it is the router's own. */}}
{{- define "backhaul.source" -}}
{{- $service := printf "%s-%s" (include "backhaul.fullname" .root) .role }}
{{- $mode := .root.Values.discovery.mode }}
{{- if eq $mode "pods" -}}
pods:///?
{{- range $key, $value := include "backhaul.poolSelector" . | fromYaml -}}labels={{ $key }}={{ $value }}&{{ end -}}
port=http
{{- else if eq $mode "endpointslices" -}}
endpointslices:///{{ $service }}?port=http
{{- else -}}
dns://{{ $service }}.{{ .root.Release.Namespace }}.svc.{{ trimSuffix "." .root.Values.clusterDomain }}.:{{ int .pool.port }}
{{- end }}
{{- end }}

{{/* Labels of the pods that answer for an engine: of several, the leader. */}}
{{- define "backhaul.poolSelector" -}}
{{ include "backhaul.selectorLabels" (dict "root" .root "component" .role) }}
{{- if eq .pool.kind "LeaderWorkerSet" }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- define "backhaul.redisUrl" -}}
{{- if .Values.valkey.enabled }}redis://{{ include "backhaul.fullname" . }}-valkey:6379/0
{{- else }}{{ .Values.redis.url }}
{{- end }}
{{- end }}

{{- define "backhaul.routerConfig" -}}
{{- $config := dict "host" "0.0.0.0" "port" (int .Values.router.port) }}
{{- with .Values.router.drain }}
{{- $_ := set $config "drain_delay" .delaySeconds }}
{{- $_ := set $config "drain_timeout" .timeoutSeconds }}
{{- end }}
{{- with .Values.router.admin }}
{{- if .enabled }}
{{- $_ := set $config "admin_port" (int .port) }}
{{- $_ := set $config "admin_host" (ternary "0.0.0.0" "127.0.0.1" .expose) }}
{{- end }}
{{- end }}
{{- with include "backhaul.redisUrl" . }}
{{- $_ := set $config "redis" . }}
{{- end }}
{{- if .Values.redis.passwordSecret.name }}
{{- $_ := set $config "redis_password_file" "/etc/backhaul/redis/password" }}
{{- end }}
{{- if .Values.sealKeySecret.name }}
{{- $_ := set $config "seal_key_file" "/etc/backhaul/seal/key" }}
{{- end }}
{{- $_ := set $config "kv_recompute_threshold" (int .Values.pools.common.kvTransfer.recomputeThreshold) }}
{{- $engines := deepCopy (dig "engines" dict .Values.router.config) }}
{{- range $role := splitList " " (include "backhaul.roles" $) }}
{{- $pool := mergeOverwrite (deepCopy $.Values.pools.common) (deepCopy (index $.Values.pools $role)) }}
{{- $entries := index $.Values.router $role }}
{{- if $pool.enabled }}
{{- $source := include "backhaul.source" (dict "root" $ "role" $role "pool" $pool) }}
{{- $entries = prepend $entries $source }}
{{- $statement := deepCopy $pool.statement }}
{{- if eq $pool.engine "vllm" }}
{{- $statement = merge $statement (dict "kind" "vllm") }}
{{- if ne $role "encode" }}
{{- $statement = merge $statement (dict "bidirectional" $pool.kvTransfer.bidirectional) }}
{{- end }}
{{- end }}
{{- if $pool.apiKeySecret.name }}
{{- $_ := set $statement "api_key_file" (printf "/etc/backhaul/%s-api-key/key" $role) }}
{{- end }}
{{- with $statement }}
{{- $_ := set $engines $source . }}
{{- end }}
{{- end }}
{{- $_ := set $config $role $entries }}
{{- end }}
{{- with $engines }}
{{- $_ := set $config "engines" . }}
{{- end }}
{{- toYaml (mergeOverwrite $config (omit .Values.router.config "engines")) }}
{{- end }}

{{/* Secrets as files, of (list NAME SECRET KEY FILE): each in a folder of its own. */}}
{{- define "backhaul.routerSecrets" -}}
{{- $secrets := list (list "redis" .Values.redis.passwordSecret "password") (list "seal" .Values.sealKeySecret "key") }}
{{- range $role := splitList " " (include "backhaul.roles" $) }}
{{- $pool := mergeOverwrite (deepCopy $.Values.pools.common) (deepCopy (index $.Values.pools $role)) }}
{{- if $pool.enabled }}
{{- $secrets = append $secrets (list (printf "%s-api-key" $role) $pool.apiKeySecret "key") }}
{{- end }}
{{- end }}
secrets:
{{- range $secrets }}
{{- if (index . 1).name }}
  - {name: {{ index . 0 }}, secret: {{ (index . 1).name }}, key: {{ (index . 1).key }}, file: {{ index . 2 }}}
{{- end }}
{{- end }}
{{- end }}
