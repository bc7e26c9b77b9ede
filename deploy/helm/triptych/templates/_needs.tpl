{{/* What must be there and the chart does not make: a line each for NOTES.txt, with the command that finds it. */}}

{{- define "triptych.needs" -}}
{{- $root := . -}}
{{- $here := printf "kubectl --namespace %s get" .Release.Namespace -}}
{{- $model := .Values.model -}}
{{- /* Lines by command: what several pools need is one line. */ -}}
{{- $lines := dict -}}
{{- if and $model.pvc.existingClaim (has $model.source (list "pvc" "download")) -}}
{{- $how := ternary "filled with the checkpoint" "into which the Job downloads" (eq $model.source "pvc") -}}
{{- $_ := set $lines (printf "%s persistentvolumeclaim %s" $here $model.pvc.existingClaim) (list (printf "model.pvc.existingClaim, %s: without it workers stay Pending" $how)) -}}
{{- else if has $model.source (list "pvc" "download" "container") -}}
{{- $class := printf "kubectl get storageclass%s" (ternary (printf " %s" $model.pvc.storageClass) "" (not (empty $model.pvc.storageClass))) -}}
{{- $_ := set $lines $class (list (printf "model.pvc.storageClass%s: without it workers stay Pending" (ternary "" " is empty: one of them is the default" (not (empty $model.pvc.storageClass))))) -}}
{{- end -}}
{{- $specs := list (dict "where" "proxy" "spec" .Values.proxy) -}}
{{- if eq .Values.store.mode "valkey" }}{{ $specs = append $specs (dict "where" "store" "spec" .Values.store) }}{{ end -}}
{{- range $kind := list "encoder" "pd" "colocated" -}}
{{- range $pool := index $root.Values (printf "%sPools" $kind) -}}
{{- $spec := deepCopy (ternary $root.Values.encoder $root.Values.pd (eq $kind "encoder")) -}}
{{- range $key, $value := $pool }}{{ $_ := set $spec $key $value }}{{ end -}}
{{- $specs = append $specs (dict "where" (printf "%sPools.%s" $kind $pool.name) "spec" $spec "kind" $kind) -}}
{{- end -}}
{{- end -}}
{{- $gpus := list -}}
{{- range $specs -}}
{{- $where := .where -}}
{{- with .spec.nodeSelector -}}
{{- $labels := list -}}
{{- range $key, $value := . }}{{ $labels = append $labels (printf "%s=%s" $key $value) }}{{ end -}}
{{- $command := printf "kubectl get nodes --selector %s" (join "," $labels) -}}
{{- $_ := set $lines $command (append (default list (get $lines $command)) (printf "%s stays Pending without such a node" $where)) -}}
{{- end -}}
{{- with .spec.priorityClassName -}}
{{- $command := printf "kubectl get priorityclass %s" . -}}
{{- $_ := set $lines $command (append (default list (get $lines $command)) (printf "%s: without it no pod is made" $where)) -}}
{{- end -}}
{{- with .spec.runtimeClassName -}}
{{- $command := printf "kubectl get runtimeclass %s" . -}}
{{- $_ := set $lines $command (append (default list (get $lines $command)) (printf "%s: without it no pod is made" $where)) -}}
{{- end -}}
{{- if hasPrefix "cuda" (default "" .spec.device) -}}
{{- $gpus = append $gpus (printf "%s: nodes with %s, which a device plugin offers" $where .spec.gpuResource) -}}
{{- end -}}
{{- if and (eq (default "" .kind) "pd") (eq (default "" .spec.engine) "vllm") .spec.vllm.cacheClaim -}}
{{- $_ := set $lines (printf "%s persistentvolumeclaim %s" $here .spec.vllm.cacheClaim) (list (printf "%s.vllm.cacheClaim: without it the pool stays Pending" $where)) -}}
{{- end -}}
{{- end -}}
{{- range include "triptych.secretsNeeded" . | fromYamlArray -}}
{{- $_ := set $lines (printf "%s secret %s" $here .name) (list (printf "%s: without it pods do not start" .value)) -}}
{{- end -}}
{{- range $command := keys $lines | sortAlpha }}
  {{ $command }}   # {{ get $lines $command | uniq | join "; " }}
{{- end }}
{{- range $gpus }}
  {{ . }}
{{- end }}
{{- end }}

{{/* Secrets that values name and pods read, as a list of name and value. */}}
{{- define "triptych.secretsNeeded" -}}
{{- $v := .Values -}}
{{- $found := list -}}
{{- range $v.image.pullSecrets }}{{ $found = append $found (dict "name" . "value" "image.pullSecrets") }}{{ end -}}
{{- with $v.internalToken.existingSecret }}{{ $found = append $found (dict "name" . "value" "internalToken.existingSecret") }}{{ end -}}
{{- if $v.apiKeys.enabled }}{{ with $v.apiKeys.existingSecret }}{{ $found = append $found (dict "name" . "value" "apiKeys.existingSecret") }}{{ end }}{{ end -}}
{{- if $v.tls.enabled }}{{ with $v.tls.existingSecret }}{{ $found = append $found (dict "name" . "value" "tls.existingSecret") }}{{ end }}{{ end -}}
{{- with $v.proxy.frontDoorTls.existingSecret }}{{ $found = append $found (dict "name" . "value" "proxy.frontDoorTls.existingSecret") }}{{ end -}}
{{- with $v.store.existingSecret }}{{ $found = append $found (dict "name" . "value" "store.existingSecret") }}{{ end -}}
{{- if eq $v.store.mode "external" -}}
{{- with dig "name" "" $v.store.external.urlSecret }}{{ $found = append $found (dict "name" . "value" "store.external.urlSecret") }}{{ end -}}
{{- with $v.store.external.caSecret }}{{ $found = append $found (dict "name" . "value" "store.external.caSecret") }}{{ end -}}
{{- with $v.store.external.clientSecret }}{{ $found = append $found (dict "name" . "value" "store.external.clientSecret") }}{{ end -}}
{{- end -}}
{{- if eq $v.model.source "download" }}{{ with $v.model.download.tokenSecret.name }}{{ $found = append $found (dict "name" . "value" "model.download.tokenSecret") }}{{ end }}{{ end -}}
{{- toYaml $found -}}
{{- end }}
