{{/* An encoder worker in each pod of a PD pool: a sidecar beside the server. Its embeddings come through shared memory,
     since the containers of a pod are in one network namespace; other pods' come by its data port. */}}

{{/* "yes" where any PD pool has encoders in its pods. */}}
{{- define "triptych.podEncoders" -}}
{{- $root := .root -}}
{{- $found := "" -}}
{{- range $pool := $root.Values.pdPools -}}
{{- if default $root.Values.pd.encoder $pool.encoder }}{{ $found = "yes" }}{{ end -}}
{{- end -}}
{{- $found -}}
{{- end }}

{{/* Its ports, beside those of the PD worker. */}}
{{- define "triptych.podEncoderPorts" -}}
ports: {grpc: 50061, embeddings: 50062, metrics: 9101}
{{- end }}

{{/* Its values: those of `encoder`, with what the pool's `encoder` names and the pool's model in their place. */}}
{{- define "triptych.podEncoderSpec" -}}
{{- $spec := deepCopy .root.Values.encoder -}}
{{- range $key, $value := .spec.encoder }}{{ $_ := set $spec $key $value }}{{ end -}}
{{- $_ := set $spec "ports" (include "triptych.podEncoderPorts" . | fromYaml).ports -}}
{{- $_ := set $spec "model" .spec.model -}}
{{- $_ := set $spec "numa" .spec.numa -}}
{{- toYaml $spec -}}
{{- end }}

{{- define "triptych.podEncoder" -}}
{{- if and (eq .component "pd") .spec.encoder }}
{{- $where := printf "pdPools.%s.encoder" .pool }}
{{- if .spec.hostNetwork }}
{{- fail (printf "%s: the containers of a pod share its network, so that hostNetwork gains nothing: take one of them out" $where) }}
{{- end }}
{{- $spec := include "triptych.podEncoderSpec" . | fromYaml }}
{{- include "triptych.checkArgs" (dict "where" $where "args" $spec.args) }}
{{- $encoder := dict "root" .root "component" "encoder" "spec" $spec "metricsName" "encoder-metrics" "suffix" "encoder" }}
- name: encoder
  image: {{ include "triptych.workerImage" $encoder }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  restartPolicy: Always
  command: [triptych]
  args:
    - encoder
    {{- with include "triptych.modelPath" . }}
    - {{ . | quote }}
    {{- end }}
    {{- include "triptych.flags" $encoder | nindent 4 }}
    - --port
    - {{ $spec.ports.grpc | quote }}
    - --advertise
    - {{ include "triptych.podAddress" $encoder | quote }}
    - --ec-transfer-port
    - {{ $spec.ports.embeddings | quote }}
    - --device
    - {{ $spec.device }}
    {{- if gt (int $spec.dataParallel) 1 }}
    - --encoder-data-parallel
    - {{ $spec.dataParallel | quote }}
    {{- end }}
    - --max-decode-seconds
    - {{ $spec.maxDecodeSeconds | quote }}
    - --ec-store-rows
    - {{ $spec.storeRows }}
    {{- with include "triptych.modelName" . }}
    - --served-model-name
    - {{ . | quote }}
    {{- end }}
    {{- with include "triptych.modelRevision" . }}
    - --model-revision
    - {{ . | quote }}
    {{- end }}
    {{- if include "triptych.onVllm" . }}
    # What vLLM computes in.
    - --dtype
    - {{ .spec.vllm.dtype }}
    {{- end }}
    {{- range $spec.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "triptych.env" $encoder | nindent 4 }}
  ports:
    - {name: encoder-grpc, containerPort: {{ $spec.ports.grpc }}}
    - {name: embeddings, containerPort: {{ $spec.ports.embeddings }}}
    - {name: encoder-metrics, containerPort: {{ $spec.ports.metrics }}}
  {{- include "triptych.probes" $encoder | nindent 2 }}
  resources:
    {{- include "triptych.gpuResources" (dict "where" $where "spec" $spec "resources" $spec.resources "ranks" (int $spec.dataParallel)) | nindent 4 }}
  securityContext:
    {{- include "triptych.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    {{- range include "triptych.secretMounts" . | fromYamlArray }}
    - {name: {{ ternary "store-password-encoder" .name (eq .name "store-password") }}, mountPath: {{ .mountPath }}, readOnly: true}
    {{- end }}
    {{- if ne .root.Values.model.source "demo" }}
    - {name: model, mountPath: /model, readOnly: true}
    {{- end }}
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
{{- end }}
{{- end }}

{{/* The password of its user in the store. */}}
{{- define "triptych.podEncoderVolumes" -}}
{{- with include "triptych.storeSecret" . -}}
- name: store-password-encoder
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ include "triptych.storeKey" (dict "root" $.root "component" "encoder") }}, path: password}]
{{- end -}}
{{- end }}

{{/* Its metrics, as an encoder's. */}}
{{- define "triptych.podEncoderEndpoint" -}}
{{- if include "triptych.podEncoders" . }}
- port: encoder-metrics
  path: /metrics
  interval: {{ .interval }}
  relabelings:
    - {targetLabel: app_kubernetes_io_component, replacement: encoder}
{{- end }}
{{- end }}
