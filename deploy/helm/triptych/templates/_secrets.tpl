{{/* A value of a Secret: what the cluster has under `name` and `key`, else `length` random characters. */}}
{{- define "triptych.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if and $found (hasKey (default dict $found.data) .key) -}}
{{- index $found.data .key | b64dec -}}
{{- else -}}
{{- randAlphaNum .length -}}
{{- end -}}
{{- end }}
