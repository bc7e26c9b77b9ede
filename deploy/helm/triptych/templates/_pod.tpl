{{/* Parts of every pod. */}}

{{/* The fields of a pod's spec besides containers and volumes. `spec` has a component's values. */}}
{{- define "triptych.pod" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ include "triptych.serviceAccount" . }}
automountServiceAccountToken: false
# A Service called triptych-… would otherwise set TRIPTYCH_… variables, which the services read as flags.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- $user := ternary $values.podSecurity.storeUser $values.podSecurity.runAsUser (eq .component "store") }}
  {{- if not (kindIs "invalid" $user) }}
  runAsUser: {{ int64 $user }}
  runAsGroup: {{ int64 (ternary $user $values.podSecurity.runAsGroup (eq .component "store")) }}
  fsGroup: {{ int64 (ternary $user $values.podSecurity.fsGroup (eq .component "store")) }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .spec.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .spec.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with include "triptych.affinity" . | fromYaml }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $values.topologySpread.enabled (ne .component "download") }}
topologySpreadConstraints:
  {{- $root := . }}
  {{- range $values.topologySpread.keys }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "triptych.selector" $root | nindent 8 }}
    {{- if ne $root.component "store" }}
    matchLabelKeys: [pod-template-hash]
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Kubernetes' affinity of a pool; with nearPd the nodes where PD workers of the release are. */}}
{{- define "triptych.affinity" -}}
{{- $affinity := deepCopy (default dict .spec.affinity) -}}
{{- with .spec.nearPd -}}
{{- if hasKey $affinity "podAffinity" -}}
{{- fail (printf "%sPools.%s: nearPd is a podAffinity, and affinity has one too: leave one of them out" $.component $.pool) -}}
{{- end -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "triptych.selector" (dict "root" $.root "component" "pd") | fromYaml)) -}}
{{- if eq . "required" -}}
{{- $_ := set $affinity "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- else -}}
{{- $weighed := dict "weight" 100 "podAffinityTerm" $term -}}
{{- $_ := set $affinity "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list $weighed)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end }}

{{- define "triptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
privileged: false
capabilities:
  drop: [ALL]
{{- end }}

{{/* Probes on the metrics port, which plain HTTP serves: the kubelet's gRPC probes know no TLS. */}}
{{- define "triptych.probes" -}}
{{- $port := default "metrics" .metricsName -}}
startupProbe:
  # A proxy gets ready with the first PD worker, which may take long to load: that is no reason to restart the proxy.
  httpGet: {path: {{ ternary "/health" "/ready" (eq .component "proxy") }}, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ max 1 (ceil (divf .spec.startupSeconds 5)) }}
readinessProbe:
  httpGet: {path: /ready, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health, port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- with .spec.preStopSeconds }}
lifecycle:
  preStop:
    sleep: {seconds: {{ . }}}
{{- end }}
{{- end }}

{{/* Variables of every container that runs triptych: where it may write, its name in the logs, and what the values add. */}}
{{- define "triptych.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
# Rounded up to whole CPUs: as many threads. Without a limit a container sees all CPUs of its node.
- name: TRIPTYCH_CPU_REQUEST
  valueFrom:
    resourceFieldRef: {resource: requests.cpu, divisor: "1"}
- name: TRIPTYCH_SERVICE
  value: $(POD_NAME){{ with .suffix }}-{{ . }}{{ end }}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /tmp/cache
- name: HF_HUB_OFFLINE
  value: "1"
{{- with .root.Values.store.external.urlSecret }}
{{- if and (eq $.root.Values.store.mode "external") .name }}
- name: TRIPTYCH_STORE
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ default "url" .key }}}
{{- end }}
{{- end }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- with .spec.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Mounts and volumes of the secrets that every service reads. */}}
{{- define "triptych.secretMounts" -}}
- {name: internal-token, mountPath: /etc/triptych/internal-token, readOnly: true}
{{- if include "triptych.storeSecret" . }}
- {name: store-password, mountPath: /etc/triptych/store, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/triptych/tls, readOnly: true}
{{- end }}
{{- if eq .root.Values.store.mode "external" }}
{{- if .root.Values.store.external.caSecret }}
- {name: store-ca, mountPath: /etc/triptych/store-ca, readOnly: true}
{{- end }}
{{- if .root.Values.store.external.clientSecret }}
- {name: store-client, mountPath: /etc/triptych/store-client, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "triptych.secretVolumes" -}}
{{ include "triptych.secretVolume" (dict "name" "internal-token" "secret" (include "triptych.internalSecret" .) "keys" (list "token")) }}
{{- with include "triptych.storeSecret" . }}
- name: store-password
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ include "triptych.storeKey" $ }}, path: password}]
{{- end }}
{{- if .root.Values.tls.enabled }}
{{ include "triptych.secretVolume" (dict "name" "tls" "secret" (include "triptych.tlsSecret" .) "keys" (list "tls.crt" "tls.key" "ca.crt")) }}
{{- end }}
{{- if eq .root.Values.store.mode "external" }}
{{- with .root.Values.store.external.caSecret }}
{{ include "triptych.secretVolume" (dict "name" "store-ca" "secret" . "keys" (list "ca.crt")) }}
{{- end }}
{{- with .root.Values.store.external.clientSecret }}
{{ include "triptych.secretVolume" (dict "name" "store-client" "secret" . "keys" (list "tls.crt" "tls.key")) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A volume of some keys of a Secret, each a file of its name. */}}
{{- define "triptych.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    items:
      {{- range .keys }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
