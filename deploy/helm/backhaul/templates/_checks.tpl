{{/* What cannot work, and that no schema tells. */}}

{{- define "backhaul.checks" -}}
{{- $redis := .Values.redis }}
{{- if not (or $redis.url $redis.urlSecret.name .Values.valkey.enabled) }}
{{- fail "redis.url: give the address of Redis or Valkey, or redis.urlSecret, or set valkey.enabled" }}
{{- end }}
{{- if gt (len (compact (list $redis.url $redis.urlSecret.name (ternary "valkey" "" .Values.valkey.enabled)))) 1 }}
{{- fail "redis: give one of redis.url, redis.urlSecret and valkey.enabled" }}
{{- end }}
{{- if regexMatch "^[^/]*//[^/@]*:[^/@]*@" $redis.url }}
{{- fail "redis.url: has a password in it; give redis.passwordSecret, or the whole URL in redis.urlSecret" }}
{{- end }}
{{- if and $redis.urlSecret.name $redis.passwordSecret.name }}
{{- fail "redis.passwordSecret: redis.urlSecret has the password" }}
{{- end }}
{{- include "backhaul.checkScaling" (dict "scaling" .Values.router.autoscaling "where" "router") }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: name the gateways" }}
{{- end }}
{{- if and .Values.monitoring.prometheusRule.enabled (not (.Files.Glob "files/rules/*.yaml")) }}
{{- fail "monitoring.prometheusRule: this version of the chart has no rules" }}
{{- end }}
{{- if and .Values.monitoring.dashboards.enabled (not (.Files.Glob "files/dashboards/*.json")) }}
{{- fail "monitoring.dashboards: this version of the chart has no dashboards" }}
{{- end }}
{{- range $role := splitList " " (include "backhaul.roles" $) }}
{{- $pool := mergeOverwrite (deepCopy $.Values.pools.common) (deepCopy (index $.Values.pools $role)) }}
{{- if $pool.enabled }}
{{- include "backhaul.checkPool" (dict "root" $ "role" $role "pool" $pool) }}
{{- else if and (eq $role "decode") (not $.Values.router.decode) }}
{{- fail "router.decode: there are no decode engines: enable pools.decode, or name some" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "backhaul.checkPool" -}}
{{- $pool := .pool }}
{{- $where := printf "pools.%s" .role }}
{{- $vllm := eq $pool.engine "vllm" }}
{{- if not $pool.model }}
{{- fail (printf "%s.model (or pools.common.model): say what is served" $where) }}
{{- end }}
{{- if and (not $vllm) (or $pool.apiKeySecret.name $pool.hfTokenSecret.name) }}
{{- fail (printf "%s: our engine has neither an API key nor a token of Hugging Face: apiKeySecret and hfTokenSecret are for vllm" $where) }}
{{- end }}
{{- if and (not $vllm) (or (gt (int $pool.parallelism.tensor) 1) (gt (int $pool.parallelism.pipeline) 1) (gt (int $pool.parallelism.data) 1) (gt (int $pool.parallelism.nodes) 1)) }}
{{- fail (printf "%s.parallelism: our engine is one process with one device" $where) }}
{{- end }}
{{- if and $vllm $pool.config }}
{{- fail (printf "%s.config: has settings of our engine; give those of vLLM as extraArgs" $where) }}
{{- end }}
{{- if and (gt (int $pool.parallelism.nodes) 1) (ne $pool.kind "LeaderWorkerSet") }}
{{- fail (printf "%s.kind: engines of several pods need LeaderWorkerSet" $where) }}
{{- end }}
{{- if and (eq $pool.kind "LeaderWorkerSet") (gt (int $pool.parallelism.nodes) 1) (ne $.root.Values.discovery.mode "pods") }}
{{- fail (printf "%s.parallelism.nodes: discovery.mode must be pods, which knows leaders from workers" $where) }}
{{- end }}
{{- if le (float64 $pool.kvTransfer.leaseSeconds) (float64 (dig "dispatch_deadline" 25.0 .root.Values.router.config)) }}
{{- fail (printf "%s.kvTransfer.leaseSeconds: must be more than router.config.dispatch_deadline (25)" $where) }}
{{- end }}
{{- if and $vllm (le (float64 $pool.kvTransfer.ttlSeconds) (float64 (dig "conversation_ttl" 450.0 .root.Values.router.config))) }}
{{- fail (printf "%s.kvTransfer.ttlSeconds: must be more than router.config.conversation_ttl (450)" $where) }}
{{- end }}
{{- if eq .role "prefill" }}
{{- $alive := ternary (int (include "backhaul.poolPreStop" .)) (int $pool.drain.timeoutSeconds) $vllm }}
{{- if lt $alive (ceil $pool.kvTransfer.leaseSeconds | int) }}
{{- fail (printf "%s.%s: must be at least kvTransfer.leaseSeconds (%v): decode engines may still read" $where (ternary "preStopSeconds" "drain.timeoutSeconds" $vllm) $pool.kvTransfer.leaseSeconds) }}
{{- end }}
{{- end }}
{{- if gt (int $pool.kvTransfer.ucx.firstPort) (int $pool.kvTransfer.ucx.lastPort) }}
{{- fail (printf "%s.kvTransfer.ucx: lastPort is less than firstPort" $where) }}
{{- end }}
{{- include "backhaul.checkScaling" (dict "scaling" $pool.autoscaling "where" $where) }}
{{- end }}

{{- define "backhaul.checkScaling" -}}
{{- if .scaling.enabled }}
{{- $key := ternary "triggers" "metrics" (eq .scaling.type "keda") }}
{{- if not (index .scaling $key) }}
{{- fail (printf "%s.autoscaling.%s: say what decides" .where $key) }}
{{- end }}
{{- if lt (int .scaling.max) (int .scaling.min) }}
{{- fail (printf "%s.autoscaling.max: is less than min" .where) }}
{{- end }}
{{- end }}
{{- end }}
