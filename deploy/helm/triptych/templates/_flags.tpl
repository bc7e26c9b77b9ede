{{/* Command-line words of the services. */}}

{{/* The words of every service. */}}
{{- define "triptych.flags" -}}
{{- $values := .root.Values -}}
- --host
- {{ include "triptych.anyHost" . | quote }}
- --metrics-port
- {{ include "triptych.port" (dict "spec" .spec "name" "metrics") | quote }}
- --log-level
- {{ $values.logLevel }}
{{- if ne $values.logFormat "text" }}
- --log-format
- {{ $values.logFormat }}
{{- end }}
{{- with $values.tracing.endpoint }}
- --otlp-endpoint
- {{ . | quote }}
- --trace-sample
- {{ $values.tracing.sample | quote }}
{{- end }}
- --drain-timeout
- {{ include "triptych.drainSeconds" .spec | quote }}
- --internal-token-file
- /etc/triptych/internal-token/token
{{- with include "triptych.storeUrl" . }}
- --store
- {{ . | quote }}
{{- end }}
{{- if include "triptych.storeSecret" . }}
- --store-password-file
- /etc/triptych/store/password
{{- end }}
{{- include "triptych.tlsFlags" . }}
{{- include "triptych.storeTlsFlags" . }}
{{- $encrypted := ternary (include "triptych.frontDoorSecret" .) $values.tls.enabled (eq .component "proxy") }}
{{- if not $encrypted }}
- --insecure
{{- end }}
{{- end }}

{{/* What a drain may take: the grace period but for the pause before SIGTERM, and 15 s to end in. */}}
{{- define "triptych.drainSeconds" -}}
{{- sub (sub (int .terminationGracePeriodSeconds) (int .preStopSeconds)) 15 -}}
{{- end }}

{{/* The user of the store that a component logs in as, and the key of its password in the store's Secret. */}}
{{- define "triptych.storeUser" -}}
{{- if .root.Values.store.acl }}triptych-{{ include "triptych.storeKey" . }}{{ end -}}
{{- end }}

{{- define "triptych.storeKey" -}}
{{- if .root.Values.store.acl -}}
{{- .component -}}
{{- else -}}
password
{{- end -}}
{{- end }}

{{/* The store's URL for a component, with its user and without a password; none where a variable gives it. */}}
{{- define "triptych.storeUrl" -}}
{{- $store := .root.Values.store -}}
{{- $url := $store.external.url -}}
{{- if eq $store.mode "valkey" -}}
{{- $name := include "triptych.name" (dict "root" .root "component" "store") -}}
{{- $url = printf "%s://%s-0.%s.svc:6379/0" (ternary "rediss" "redis" .root.Values.tls.enabled) $name .root.Release.Namespace -}}
{{- end -}}
{{- $user := include "triptych.storeUser" . -}}
{{- if and $user (include "triptych.storeSecret" .) -}}
{{- regexReplaceAll "://" $url (printf "://%s@" $user) -}}
{{- else -}}
{{- $url -}}
{{- end -}}
{{- end }}

{{/*
What the workers of a pool are told apart by where the proxies scale it: {model, kind, role} as JSON. Empty where the
pool is the only one that encodes or decodes: then the decision is about all. Pools that could do each other's work,
also encoders in the pods of PD pools, are told apart by their names, as kinds.
*/}}
{{- define "triptych.scaleTarget" -}}
{{- $values := .root.Values -}}
{{- $own := .pool -}}
{{- $component := .component -}}
{{- $target := dict -}}
{{- $pools := concat (index $values (printf "%sPools" $component)) $values.colocatedPools -}}
{{- $model := include "triptych.modelName" (dict "root" .root "spec" (dict "model" (default (index $values $component).model $own.model))) -}}
{{- if eq $component "encoder" -}}
{{- range $values.pdPools -}}
{{- $same := eq $model (include "triptych.modelName" (dict "root" $.root "spec" (dict "model" (default $values.pd.model .model)))) -}}
{{- if and $same (default $values.pd.encoder .encoder) }}{{ $_ := set $target "kind" $own.name }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if gt (len $pools) 1 -}}
{{- with $model }}{{ $_ := set $target "model" . }}{{ end -}}
{{- $role := "both" -}}
{{- if eq $component "pd" -}}
{{- $role = default (default "both" $values.pd.role) $own.role -}}
{{- if ne $role "both" }}{{ $_ := set $target "role" $role }}{{ end -}}
{{- end -}}
{{- range $index, $other := $pools -}}
{{- $colocated := ge $index (len (index $values (printf "%sPools" $component))) -}}
{{- $defaults := ternary $values.pd (index $values $component) $colocated -}}
{{- $same := eq $model (include "triptych.modelName" (dict "root" $.root "spec" (dict "model" (default $defaults.model $other.model)))) -}}
{{- $others := ternary (default (default "both" $values.pd.role) $other.role) "both" (and (eq $component "pd") (not $colocated)) -}}
{{- $meets := or (eq $role $others) (eq $role "both") (eq $others "both") -}}
{{- if and $same $meets (or $colocated (ne $other.name $own.name)) }}{{ $_ := set $target "kind" $own.name }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toJson $target -}}
{{- end }}

{{/* The pools that are scaled by the proxies' decisions, as their limits. */}}
{{- define "triptych.scalingFlags" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $engine := $values.autoscaling.engine -}}
{{- $any := false -}}
{{- range $role, $flag := dict "encoder" "encoders" "pd" "pd-workers" -}}
{{- $pools := index $values (printf "%sPools" $role) -}}
{{- range $pool := $pools -}}
{{- $limits := $pool.autoscale -}}
{{- if and $limits (or (eq $engine "keda") (and (eq $engine "hpa") (eq (len $pools) 1))) -}}
{{- $least := include "triptych.least" (dict "role" $role "pool" $pool "defaults" (index $values $role) "engine" $engine) -}}
{{- $target := include "triptych.scaleTarget" (dict "root" $root "component" $role "pool" $pool) | fromJson -}}
{{- if and $target (eq $engine "keda") }}
- --scale
- {{ $role }}
{{- range $name := list "model" "kind" "role" -}}
{{- with index $target $name }};{{ $name }}={{ . }}{{ end -}}
{{- end -}}
;min={{ $least }};max={{ $limits.max }}
{{- with $limits.price }};price={{ . }}{{ end }}
{{- else }}
- --min-{{ $flag }}
- {{ $least | quote }}
- --max-{{ $flag }}
- {{ $limits.max | quote }}
{{- end }}
{{- $any = true }}
{{- end }}
{{- end }}
{{- end }}
{{- if $any }}
- --encoder-slo
- {{ $values.autoscaling.encoderSlo | quote }}
- --scale-window
- {{ $values.autoscaling.window | quote }}
{{- if eq $engine "keda" }}
- --scaler-port
- "6000"
- --scaler-host
- {{ include "triptych.anyHost" . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The least workers of a scaled pool: 0 only for encoders on CPUs under KEDA, unless it is given. GPUs start slowly. */}}
{{- define "triptych.least" -}}
{{- $device := default .defaults.device .pool.device -}}
{{- $least := ternary 0 1 (and (eq .role "encoder") (eq .engine "keda") (eq $device "cpu")) -}}
{{- if hasKey .pool.autoscale "min" }}{{ .pool.autoscale.min }}{{ else }}{{ $least }}{{ end -}}
{{- end }}
