{{/* PD workers whose engine is vLLM: a server beside each, with our connector, as a sidecar. */}}

{{/* "yes" for a pool in front of vLLM. */}}
{{- define "triptych.onVllm" -}}
{{- if and (eq .component "pd") (eq .spec.engine "vllm") }}yes{{ end -}}
{{- end }}

{{/* The names of the pools in front of vLLM, with | between them. */}}
{{- define "triptych.vllmPools" -}}
{{- $root := .root -}}
{{- $names := list -}}
{{- range $pool := $root.Values.pdPools -}}
{{- if eq (default $root.Values.pd.engine $pool.engine) "vllm" }}{{ $names = append $names $pool.name }}{{ end -}}
{{- end -}}
{{- join "|" $names -}}
{{- end }}

{{/* The words of our PD worker. It has no weights and no device; vLLM's address is its own pod's. */}}
{{- define "triptych.vllmFlags" -}}
- --engine
- vllm
- --engine-url
- http://127.0.0.1:{{ include "triptych.port" (dict "spec" .spec "name" "engine") }}
- --dtype
- {{ .spec.vllm.dtype }}
{{- end }}

{{/* The connector's configuration, with @NAMESPACE@ where the namespace belongs. */}}
{{- define "triptych.vllmTransfer" -}}
{{- $vllm := dict "root" .root "component" "vllm" "spec" .spec -}}
{{- $options := dict "store" (include "triptych.storeUrl" $vllm) "wait_seconds" 2 -}}
{{- $_ := set $options "namespace" (concat (list "@NAMESPACE@") .spec.vllm.namespaces) -}}
{{- $_ := set $options "host_memory_bytes" (include "triptych.bytes" .spec.vllm.hostMemory | int64) -}}
{{- if ne .spec.vllm.engineClass "known" -}}
{{- $_ := set $options "engine_class" .spec.vllm.engineClass -}}
{{- end -}}
{{- if include "triptych.storeSecret" $vllm -}}
{{- $_ := set $options "store_password_file" "/etc/triptych/store-vllm/password" -}}
{{- end -}}
{{- $_ := set $options "internal_token_file" "/etc/triptych/internal-token/token" -}}
{{- $words := concat (include "triptych.storeTlsFlags" $vllm | fromYamlArray) (include "triptych.tlsFlags" $vllm | fromYamlArray) -}}
{{- range $at, $word := $words -}}
{{- if eq (mod $at 2) 0 -}}
{{- $_ := set $options ($word | trimPrefix "--" | replace "-" "_") (index $words (add1 $at | int)) -}}
{{- end -}}
{{- end -}}
{{- $all := dict "ec_connector" "TriptychECConnector" "ec_connector_module_path" "triptych.integrations.vllm" -}}
{{- dict "ec_role" "ec_consumer" "ec_connector_extra_config" $options | merge $all | toJson -}}
{{- end }}

{{/* The init containers of a pool in front of vLLM: the namespace, by the workers' own image, then the server.
     A sidecar starts before our worker and ends after it: streams are drained or handed over while vLLM lives. */}}
{{- define "triptych.vllmInit" -}}
- name: namespace
  image: {{ include "triptych.workerImage" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - |
      set -e
      mkdir -p /tmp/vllm
      namespace=$(triptych namespace "$@")
      echo "$EC_TRANSFER" | sed "s/@NAMESPACE@/$namespace/" > /tmp/vllm/ec-transfer.json
    - namespace
    - {{ include "triptych.modelPath" . | quote }}
    - --dtype
    - {{ .spec.vllm.dtype }}
    {{- with include "triptych.modelRevision" . }}
    - --model-revision
    - {{ . | quote }}
    {{- end }}
  env:
    - name: EC_TRANSFER
      value: {{ include "triptych.vllmTransfer" . | quote }}
    - {name: HOME, value: /tmp}
    - {name: HF_HUB_OFFLINE, value: "1"}
  resources:
    {{- include "triptych.workerResources" . | nindent 4 }}
  securityContext:
    {{- include "triptych.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
    - {name: tmp, mountPath: /tmp}
- name: vllm
  image: {{ include "triptych.image" (dict "root" .root "kind" "cpu" "given" .spec.vllm.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  restartPolicy: Always
  command: [sh, -c]
  args:
    - exec vllm serve "$@" --ec-transfer-config "`cat /tmp/vllm/ec-transfer.json`"
    - vllm
    - {{ include "triptych.modelPath" . | quote }}
    # Who reaches this port names any embedding: only our worker does.
    - --host
    - 127.0.0.1
    - --port
    - {{ include "triptych.port" (dict "spec" .spec "name" "engine") | quote }}
    - --dtype
    - {{ .spec.vllm.dtype }}
    - --enable-scale-out
    - --enable-mm-embeds
    - --enable-prompt-tokens-details
    {{- if gt (int .spec.tensorParallel) 1 }}
    - --tensor-parallel-size
    - {{ .spec.tensorParallel | quote }}
    {{- end }}
    {{- with include "triptych.modelName" . }}
    - --served-model-name
    - {{ . | quote }}
    {{- end }}
    {{- if eq .spec.vllm.kvConnector "nixl" }}
    - --kv-transfer-config
    - '{"kv_connector": "NixlConnector", "kv_role": "{{ ternary "kv_producer" "kv_consumer" (eq .spec.role "prefill") }}", "kv_connector_extra_config": {"kv_lease_duration": 60}}'
    {{- end }}
    {{- with .spec.vllm.loraModules }}
    - --enable-lora
    - --max-lora-rank
    - {{ $.spec.vllm.maxLoraRank | quote }}
    - --max-loras
    - {{ min 4 (len .) | quote }}
    - --max-cpu-loras
    - {{ len . | quote }}
    - --lora-modules
    {{- range $name, $folder := . }}
    - {{ dict "name" $name "path" (printf "/model/%s" $folder) | toJson | quote }}
    {{- end }}
    {{- end }}
    {{- with .spec.vllm.speculativeConfig }}
    - --speculative-config
    - {{ toJson . | quote }}
    {{- end }}
    {{- range .spec.vllm.args }}
    - {{ . | quote }}
    {{- end }}
  {{- if eq .spec.vllm.kvConnector "nixl" }}
  ports:
    - {name: kv, containerPort: 5600}
  {{- end }}
  env:
    {{- if eq .spec.vllm.kvConnector "nixl" }}
    - name: VLLM_NIXL_SIDE_CHANNEL_HOST
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: "5600"}
    {{- end }}
    # Libraries ask for the name of the user, which the image does not have.
    - {name: USER, value: triptych}
    - {name: HOME, value: /tmp}
    # What is compiled: vLLM's, inductor's, Triton's and FlashInfer's caches.
    - {name: XDG_CACHE_HOME, value: /cache}
    - {name: VLLM_CACHE_ROOT, value: /cache/vllm}
    - {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
    - {name: TRITON_CACHE_DIR, value: /cache/triton}
    - {name: FLASHINFER_WORKSPACE_BASE, value: /cache}
    - {name: HF_HUB_OFFLINE, value: "1"}
    - {name: VLLM_NO_USAGE_STATS, value: "1"}
    {{- with .root.Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .spec.vllm.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  startupProbe:
    exec: {command: [python3, -c, {{ include "triptych.vllmHealth" .spec | quote }}]}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: {{ max 1 (ceil (divf .spec.startupSeconds 10)) }}
  # Our worker sees a server that hangs, and proxies resume its requests; this restarts one whose engine has died.
  livenessProbe:
    exec: {command: [python3, -c, {{ include "triptych.vllmHealth" .spec | quote }}]}
    periodSeconds: 15
    timeoutSeconds: 10
    failureThreshold: 4
  resources:
    {{- include "triptych.gpuResources" (dict "where" (printf "pdPools.%s.vllm" .pool) "spec" .spec "resources" .spec.vllm.resources "ranks" (int .spec.tensorParallel)) | nindent 4 }}
  securityContext:
    {{- include "triptych.computeSecurity" (dict "rdma" .spec.rdma) | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: vllm-cache, mountPath: /cache}
    - {name: shm, mountPath: /dev/shm}
    {{- range include "triptych.secretMounts" . | fromYamlArray }}
    {{- if ne .name "store-password" }}
    - {name: {{ .name }}, mountPath: {{ .mountPath }}, readOnly: true}
    {{- end }}
    {{- end }}
    {{- if include "triptych.storeSecret" . }}
    - {name: store-password-vllm, mountPath: /etc/triptych/store-vllm, readOnly: true}
    {{- end }}
{{- end }}

{{- define "triptych.vllmHealth" -}}
from urllib.request import urlopen; urlopen("http://127.0.0.1:{{ include "triptych.port" (dict "spec" . "name" "engine") }}/health", timeout=8)
{{- end }}

{{/* The volumes of vLLM's own: what it has compiled, and the password of its user. */}}
{{- define "triptych.vllmVolumes" -}}
- name: vllm-cache
  {{- with .spec.vllm.cacheClaim }}
  persistentVolumeClaim: {claimName: {{ . }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .spec.vllm.cacheSize }}}
  {{- end }}
{{ with include "triptych.storeSecret" . -}}
- name: store-password-vllm
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ include "triptych.storeKey" (dict "root" $.root "component" "vllm") }}, path: password}]
{{- end -}}
{{- end }}

{{/* The endpoint of vLLM's own metrics. Those that our worker counts under the same names are left out: a sum would
     have them twice. */}}
{{- define "triptych.engineEndpoint" -}}
{{- if include "triptych.vllmPools" . }}
- port: metrics
  path: /metrics/engine
  interval: {{ .interval }}
  relabelings:
    # No other worker has that page.
    - action: keep
      sourceLabels: [{{ .meta }}_label_app_kubernetes_io_component, {{ .meta }}_label_triptych_pool]
      regex: pd;({{ include "triptych.vllmPools" . }})
  metricRelabelings:
    - action: drop
      sourceLabels: [__name__]
      regex: vllm:(num_requests_(running|waiting)|(prompt|generation)_tokens|prefix_cache_(queries|hits)|request_success|time_to_first_token_seconds|inter_token_latency_seconds|(e2e_request_latency|request_(queue|prefill|decode)_time)_seconds)(_total|_created|_bucket|_sum|_count)?
{{- end }}
{{- end }}

{{/* "yes" where the KV of prompts moves between the vLLM of any two PD pools. */}}
{{- define "triptych.movesKV" -}}
{{- $defaults := .root.Values.pd -}}
{{- $found := "" -}}
{{- range $pool := .root.Values.pdPools -}}
{{- if eq (dig "kvConnector" $defaults.vllm.kvConnector (default dict $pool.vllm)) "nixl" }}{{ $found = "yes" }}{{ end -}}
{{- end -}}
{{- $found -}}
{{- end }}
