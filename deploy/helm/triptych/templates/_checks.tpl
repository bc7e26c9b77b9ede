{{/* The services drain for what is left of the grace period after the pause, less 15 s to end in. */}}
{{- define "triptych.checkGrace" -}}
{{- if lt (int .grace) (add (int .stop) 20 | int) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds is %d and preStopSeconds %d: at least 20 s must be left to drain" .where (int .grace) (int .stop)) -}}
{{- end -}}
{{- end }}
