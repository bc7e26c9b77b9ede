{{/* The services drain for what is left of the grace period after the pause, less 15 s to end in. */}}
{{- define "triptych.checkGrace" -}}
{{- if lt (int .grace) (add (int .stop) 20 | int) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds is %d and preStopSeconds %d: at least 20 s must be left to drain" .where (int .grace) (int .stop)) -}}
{{- end -}}
{{- end }}

{{/* What a pool in front of vLLM needs: an image with vLLM, a checkpoint that it reads, and encoders of the same dtype. */}}
{{- define "triptych.checkVllm" -}}
{{- $where := printf "pdPools.%s" .pool.name -}}
{{- if not .vllm.image -}}
{{- fail (printf "%s: engine is vllm and vllm.image is empty: give an image of vLLM with triptych in it, see docs/kubernetes.md" $where) -}}
{{- end -}}
{{- if eq .values.model.source "demo" -}}
{{- fail (printf "%s: engine is vllm and model.source is demo: vLLM does not have the demo model; set model.source" $where) -}}
{{- end -}}
{{- if and (eq .values.store.mode "external") (not .values.store.external.url) -}}
{{- fail (printf "%s: engine is vllm and the store's URL comes from a Secret: give store.external.url without its password, and the password by store.existingSecret" $where) -}}
{{- end -}}
{{- $dtype := printf "--dtype %s" .vllm.dtype -}}
{{- range $encoder := .values.encoderPools -}}
{{- if not (contains $dtype (join " " (default $.values.encoder.args $encoder.args))) -}}
{{- fail (printf "encoderPools.%s: args have no %q: encoders save what vLLM reads, which computes in vllm.dtype" $encoder.name $dtype) -}}
{{- end -}}
{{- end -}}
{{- end }}
