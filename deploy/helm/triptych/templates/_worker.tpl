{{/* The Deployment of one pool. `component` is encoder, pd or colocated, `spec` the pool with its defaults. */}}
{{- define "triptych.worker" -}}
{{- $p := .spec }}
{{- $cuda := hasPrefix "cuda" $p.device }}
{{- $ranks := include "triptych.ranks" . | int }}
{{- $vllm := include "triptych.onVllm" . }}
{{- include "triptych.checkShm" . }}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "triptych.metadata" . | nindent 2 }}
spec:
  {{- if not (and $p.autoscale (ne .root.Values.autoscaling.engine "none")) }}
  replicas: {{ $p.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  selector:
    matchLabels:
      {{- include "triptych.selector" . | nindent 6 }}
  strategy:
    type: RollingUpdate
    # Where GPUs or a node's ports are taken a new pod starts only when an old one has gone.
    rollingUpdate: {{ if or $cuda $p.hostNetwork }}{maxSurge: 0, maxUnavailable: 1}{{ else }}{maxSurge: 1, maxUnavailable: 0}{{ end }}
  template:
    metadata:
      labels:
        {{- include "triptych.podLabels" . | nindent 8 }}
        {{- /* The roles that llm-d's tools and schedulers select by. */}}
        {{- $pd := index (dict "both" "prefill-decode" "prefill" "prefill" "decode" "decode") (default "both" $p.role) }}
        llm-d.ai/role: {{ index (dict "encoder" "encode" "pd" $pd "colocated" "encode-prefill-decode") .component }}
        {{- with $p.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        kubectl.kubernetes.io/default-container: {{ .component }}
        {{- with $p.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "triptych.pod" . | nindent 6 }}
      terminationGracePeriodSeconds: {{ $p.terminationGracePeriodSeconds }}
      {{- $init := list (include "triptych.modelInit" . | trim) }}
      {{- $podEncoder := include "triptych.podEncoder" . }}
      {{- with $podEncoder }}{{ $init = append $init (trim .) }}{{ end }}
      {{- if $vllm }}{{ $init = append $init (include "triptych.vllmInit" .) }}{{ end }}
      {{- with compact $init | join "\n" }}
      initContainers:
        {{- . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .component }}
          image: {{ include "triptych.workerImage" . }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          command: [triptych]
          args:
            - {{ .component }}
            {{- with include "triptych.modelPath" . }}
            - {{ . | quote }}
            {{- end }}
            {{- include "triptych.flags" . | nindent 12 }}
            - --port
            - {{ include "triptych.port" (dict "spec" $p "name" "grpc") | quote }}
            - --advertise
            - {{ include "triptych.podAddress" . | quote }}
            {{- if ne .component "pd" }}
            - --ec-transfer-port
            - {{ include "triptych.port" (dict "spec" $p "name" "embeddings") | quote }}
            {{- end }}
            {{- if $vllm }}
            {{- include "triptych.vllmFlags" . | nindent 12 }}
            {{- else }}
            - --device
            - {{ $p.device }}
            {{- end }}
            {{- if and (gt $ranks 1) (not $vllm) }}
            {{- range $kind, $flag := dict "encoder" "--encoder-data-parallel" "pd" "--tensor-parallel" }}
            {{- if has $.component (list $kind "colocated") }}
            - {{ $flag }}
            - {{ $ranks | quote }}
            {{- end }}
            {{- end }}
            {{- end }}
            {{- if ne .component "encoder" }}
            - --schemas
            - {{ $p.schemas }}
            {{- if not $vllm }}
            - --linear-kernel
            - {{ $p.linearKernel }}
            - --share-prefixes
            - {{ $p.sharePrefixes | quote }}
            {{- end }}
            {{- end }}
            {{- if and (eq .component "pd") (ne $p.role "both") }}
            - --role
            - {{ $p.role }}
            {{- end }}
            {{- if and $vllm (ne $p.vllm.kvConnector "none") }}
            - --kv-connector
            - {{ $p.vllm.kvConnector }}
            {{- end }}
            {{- if and $vllm (ne $p.vllm.engineClass "known") }}
            - --engine-class
            - {{ $p.vllm.engineClass }}
            {{- end }}
            {{- if $vllm }}
            {{- range $name, $folder := $p.vllm.loraModules }}
            - --lora-modules
            - {{ printf "%s=/model/%s" $name $folder | quote }}
            {{- end }}
            {{- end }}
            {{- if ne .component "pd" }}
            - --max-decode-seconds
            - {{ default .root.Values.encoder.maxDecodeSeconds $p.maxDecodeSeconds | quote }}
            - --ec-store-rows
            - {{ default .root.Values.encoder.storeRows $p.storeRows }}
            {{- end }}
            {{- with include "triptych.modelName" . }}
            - --served-model-name
            - {{ . | quote }}
            {{- end }}
            {{- with include "triptych.modelRevision" . }}
            - --model-revision
            - {{ . | quote }}
            {{- end }}
            {{- if and (ne .component "colocated") $p.autoscale (eq .root.Values.autoscaling.engine "keda") }}
            {{- with (include "triptych.scaleTarget" (dict "root" .root "component" .component "pool" (set (deepCopy $p) "name" .pool)) | fromJson).kind }}
            - --worker-kind
            - {{ . | quote }}
            {{- end }}
            {{- end }}
            {{- range $p.args }}
            - {{ . | quote }}
            {{- end }}
          env:
            {{- include "triptych.env" . | nindent 12 }}
          ports:
            - {name: grpc, containerPort: {{ include "triptych.port" (dict "spec" $p "name" "grpc") }}}
            {{- if ne .component "pd" }}
            - {name: embeddings, containerPort: {{ include "triptych.port" (dict "spec" $p "name" "embeddings") }}}
            {{- end }}
            - {name: metrics, containerPort: {{ include "triptych.port" (dict "spec" $p "name" "metrics") }}}
          {{- include "triptych.probes" . | nindent 10 }}
          resources:
            {{- include "triptych.workerResources" . | nindent 12 }}
          securityContext:
            {{- include "triptych.computeSecurity" (dict "rdma" (and (not $vllm) $p.rdma)) | nindent 12 }}
          volumeMounts:
            {{- include "triptych.secretMounts" . | nindent 12 }}
            {{- if ne .root.Values.model.source "demo" }}
            - {name: model, mountPath: /model, readOnly: true}
            {{- end }}
            - {name: tmp, mountPath: /tmp}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        {{- include "triptych.secretVolumes" . | nindent 8 }}
        {{- include "triptych.modelVolume" . | nindent 8 }}
        {{- if $vllm }}
        {{- include "triptych.vllmVolumes" . | nindent 8 }}
        {{- end }}
        {{- if $podEncoder }}
        {{- include "triptych.podEncoderVolumes" . | nindent 8 }}
        {{- end }}
        - name: tmp
          emptyDir: {sizeLimit: {{ $p.scratchSize }}}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ include "triptych.shmSize" . }}}
{{- end }}

{{/* The ranks of one worker: processes of one pod. Both sides of a replica have as many. */}}
{{- define "triptych.ranks" -}}
{{- if eq .component "encoder" }}{{ .spec.dataParallel }}{{ else }}{{ .spec.tensorParallel }}{{ end -}}
{{- end }}

{{/* The size of /dev/shm. NCCL keeps its buffers between ranks there: 64 MiB are too few for it. */}}
{{- define "triptych.shmSize" -}}
{{- $own := include "triptych.bytes" .spec.shmSize | int64 -}}
{{- if include "triptych.onVllm" . -}}
{{- /* Both containers'. The connector's host copies are there, which vLLM's processes share; NCCL's buffers too. */ -}}
{{- add (max $own 1073741824) (include "triptych.bytes" .spec.vllm.hostMemory | int64) -}}
{{- else -}}
{{- $least := and (hasPrefix "cuda" .spec.device) (gt (include "triptych.ranks" . | int) 1) -}}
{{- if and $least (lt $own 1073741824) }}1Gi{{ else }}{{ .spec.shmSize }}{{ end -}}
{{- end -}}
{{- end }}

{{/* A worker's image; one in front of vLLM computes nothing. */}}
{{- define "triptych.workerImage" -}}
{{- $cuda := and (hasPrefix "cuda" .spec.device) (not (include "triptych.onVllm" .)) -}}
{{- include "triptych.image" (dict "root" .root "kind" (ternary "cuda" "cpu" $cuda) "given" .spec.image) -}}
{{- end }}
