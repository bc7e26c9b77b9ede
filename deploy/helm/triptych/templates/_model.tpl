{{/* Where the checkpoint is. */}}

{{/* The folder of the checkpoint in the container; none for the demo model. A pool may have one of its own. */}}
{{- define "triptych.modelPath" -}}
{{- $model := .root.Values.model -}}
{{- if ne $model.source "demo" -}}
{{- $path := default $model.path (dig "model" "path" "" .spec) -}}
{{- if and (eq $model.source "download") (not $path) }}{{ $path = include "triptych.downloadFolder" . }}{{ end -}}
/model{{ with $path }}/{{ trimAll "/" . }}{{ end }}
{{- end -}}
{{- end }}

{{/* The folder that the download fills: one for each model and revision, so that two versions live side by side. */}}
{{- define "triptych.downloadFolder" -}}
{{- $download := .root.Values.model.download -}}
{{- printf "%s--%s" ($download.id | replace "/" "--") ($download.revision | replace "/" "-") -}}
{{- end }}

{{/* What names the weights in cache keys: model.revision, or a downloaded commit. Branches move, so they are no name. */}}
{{- define "triptych.modelRevision" -}}
{{- $model := .root.Values.model -}}
{{- $own := default dict .spec.model -}}
{{- if $own -}}
{{- default "" $own.revision -}}
{{- else if $model.revision -}}
{{- $model.revision -}}
{{- else if and (eq $model.source "download") (regexMatch "^[0-9a-f]{40}$" $model.download.revision) -}}
{{- $model.download.revision -}}
{{- end -}}
{{- end }}

{{- define "triptych.modelClaim" -}}
{{- default (printf "%s-model" (include "triptych.fullname" .)) .root.Values.model.pvc.existingClaim -}}
{{- end }}

{{- define "triptych.modelVolume" -}}
{{- $model := .root.Values.model -}}
{{- if eq $model.source "image" }}
- name: model
  image:
    reference: {{ default $model.image.reference (dig "model" "image" "" .spec) }}
    pullPolicy: {{ $model.image.pullPolicy }}
{{- else if ne $model.source "demo" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ include "triptych.modelClaim" . }}
    readOnly: true
{{- end }}
{{- end }}

{{/* Workers wait for the download: the Job writes the file when everything is there. */}}
{{- define "triptych.modelInit" -}}
{{- if eq .root.Values.model.source "download" }}
- name: wait-for-model
  image: {{ include "triptych.image" (dict "root" .root "kind" (ternary "cuda" "cpu" (hasPrefix "cuda" .spec.device)) "given" .spec.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - until [ -f "$COMPLETE" ]; do echo "waiting for $COMPLETE"; sleep 5; done
  env:
    - name: COMPLETE
      value: {{ include "triptych.modelPath" . }}/.complete
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  securityContext:
    {{- include "triptych.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}
