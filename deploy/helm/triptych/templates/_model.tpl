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

{{/* The name that clients ask for: a pool's own, where several models are behind the proxies. */}}
{{- define "triptych.modelName" -}}
{{- default .root.Values.model.name (dig "model" "name" "" .spec) -}}
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

{{/* "yes" where every pod fills a disk of its own: no other mode than ReadWriteMany is several nodes'. */}}
{{- define "triptych.modelPerPod" -}}
{{- $model := .root.Values.model -}}
{{- if eq $model.source "container" }}yes{{ else if and (eq $model.source "download") (not $model.pvc.existingClaim) (not (has "ReadWriteMany" $model.pvc.accessModes)) }}yes{{ end -}}
{{- end }}

{{/* The spec of a claim that the chart makes. */}}
{{- define "triptych.modelClaimSpec" -}}
{{- $pvc := .root.Values.model.pvc -}}
accessModes:
  {{- toYaml $pvc.accessModes | nindent 2 }}
{{- with $pvc.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ $pvc.size }}
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
{{- else if include "triptych.modelPerPod" . }}
- name: model
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "triptych.modelClaimSpec" . | nindent 8 }}
{{- else if ne $model.source "demo" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ include "triptych.modelClaim" . }}
    readOnly: true
{{- end }}
{{- end }}

{{/* The container that downloads the model, with the image `image`. */}}
{{- define "triptych.downloadContainer" -}}
{{- $download := .root.Values.model.download -}}
- name: download
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -c]
  args:
    # What a broken download left is resumed; the file at the end says that everything is there.
    - |
      {{- .root.Files.Get "files/download.py" | trim | nindent 6 }}
  env:
    - {name: MODEL_ID, value: {{ $download.id | quote }}}
    - {name: MODEL_REVISION, value: {{ $download.revision | quote }}}
    - {name: FOLDER, value: {{ include "triptych.modelPath" (dict "root" .root "spec" dict) | quote }}}
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/hf}
    {{- with $download.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $download.tokenSecret.name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: {{ $download.tokenSecret.key }}}
    {{- end }}
    {{- with .root.Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- $own := include "triptych.guaranteed" (dict "resources" $download.resources "numa" .numa "where" "model.download") | fromYaml }}
    {{- include "triptych.resources" (dict "where" "model.download" "resources" $own) | nindent 4 }}
  securityContext:
    {{- include "triptych.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* A container of the user's that fills the pod's own disk. */}}
{{- define "triptych.fillContainer" -}}
{{- $own := .root.Values.model.container -}}
{{- if not $own.image }}{{ fail "model.source is container and model.container.image is empty: give an image that fills /model, like one with aws or gcloud" }}{{ end -}}
- name: fill
  image: {{ $own.image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- with $own.command }}
  command:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  args:
    {{- toYaml $own.args | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
    {{- with concat .root.Values.extraEnv $own.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- $given := include "triptych.guaranteed" (dict "resources" $own.resources "numa" .spec.numa "where" "model.container") | fromYaml }}
    {{- include "triptych.resources" (dict "where" "model.container" "resources" $given) | nindent 4 }}
  securityContext:
    {{- include "triptych.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Workers download the model, or wait for the Job's download: it writes the file when everything is there. */}}
{{- define "triptych.modelInit" -}}
{{- if eq .root.Values.model.source "container" }}
{{ include "triptych.fillContainer" . }}
{{- else if include "triptych.modelPerPod" . }}
{{ include "triptych.downloadContainer" (dict "root" .root "image" (include "triptych.workerImage" .) "numa" .spec.numa) }}
{{- else if eq .root.Values.model.source "download" }}
- name: wait-for-model
  image: {{ include "triptych.workerImage" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - |
      until [ -f "$COMPLETE" ]; do echo "waiting for $COMPLETE, which a download writes at its end"; sleep 5; done
      {{- if eq (include "triptych.modelPath" .) (include "triptych.modelPath" (dict "root" .root "spec" dict)) }}
      # One of an older chart is empty.
      [ ! -s "$COMPLETE" ] || grep -qxF -- "$WANTED" "$COMPLETE" && exit
      echo "$COMPLETE is of $(cat "$COMPLETE"), and $WANTED is wanted: leave model.path out, or name another folder"
      exit 1
      {{- end }}
  env:
    - name: COMPLETE
      value: {{ include "triptych.modelPath" . }}/.complete
    - name: WANTED
      value: {{ printf "%s@%s" .root.Values.model.download.id .root.Values.model.download.revision | quote }}
  resources:
    {{- $small := dict "requests" (dict "cpu" "10m" "memory" "16Mi") "limits" (dict "memory" "64Mi") }}
    {{- if .spec.numa }}{{ $small = dict "requests" (dict "cpu" "100m" "memory" "64Mi") }}{{ end }}
    {{- include "triptych.guaranteed" (dict "resources" $small "numa" .spec.numa "where" "wait-for-model") | nindent 4 }}
  securityContext:
    {{- include "triptych.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}
