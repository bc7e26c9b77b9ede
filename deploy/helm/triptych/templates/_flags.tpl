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

{{/* The pool that is scaled by the proxies' decision, as its limits: --min-…, --max-…. */}}
{{- define "triptych.scalingFlags" -}}
{{- $values := .root.Values -}}
{{- $any := false -}}
{{- range $role, $flag := dict "encoder" "encoders" "pd" "pd-workers" -}}
{{- $pools := index $values (printf "%sPools" $role) -}}
{{- if and (ne $values.autoscaling.engine "none") (eq (len $pools) 1) -}}
{{- with (first $pools).autoscale }}
- --min-{{ $flag }}
- {{ include "triptych.least" (dict "role" $role "pool" (first $pools) "defaults" (index $values $role) "engine" $values.autoscaling.engine) | quote }}
- --max-{{ $flag }}
- {{ .max | quote }}
{{- $any = true }}
{{- end }}
{{- end }}
{{- end }}
{{- if $any }}
- --encoder-slo
- {{ $values.autoscaling.encoderSlo | quote }}
- --scale-window
- {{ $values.autoscaling.window | quote }}
{{- if eq $values.autoscaling.engine "keda" }}
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
