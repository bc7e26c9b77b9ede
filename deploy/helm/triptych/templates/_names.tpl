{{/* Names, labels, images and addresses. Each takes a dict with `root`, and what else it names. */}}

{{- define "triptych.fullname" -}}
{{- default .root.Release.Name .root.Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{/* The name of a component's objects: RELEASE-proxy, RELEASE-encoder-POOL. */}}
{{- define "triptych.name" -}}
{{- $name := printf "%s-%s" (include "triptych.fullname" .) .component -}}
{{- if .pool }}{{ $name }}-{{ .pool }}{{ else }}{{ $name }}{{ end -}}
{{- end }}

{{- define "triptych.selector" -}}
app.kubernetes.io/name: triptych
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
triptych/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "triptych.labels" -}}
{{ include "triptych.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels of pods: no versions, with which every release of the chart would restart what it does not change. */}}
{{- define "triptych.podLabels" -}}
{{ include "triptych.selector" . }}
app.kubernetes.io/part-of: triptych
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* metadata of an object; `component`, `pool` and `suffix` are optional. */}}
{{- define "triptych.metadata" -}}
name: {{ with .object }}{{ . }}{{ else }}{{ include "triptych.name" . }}{{ end }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "triptych.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* An image: `given`, else the one of `kind`; with the registry in front and, where it names neither tag nor digest, the tag. */}}
{{- define "triptych.image" -}}
{{- $values := .root.Values.image -}}
{{- $image := default (index $values .kind) .given -}}
{{- if not (or (contains "@" $image) (regexMatch ":[^/]+$" $image)) -}}
{{- $image = printf "%s:%s" $image (default .root.Chart.AppVersion $values.tag) -}}
{{- end -}}
{{- with $values.registry -}}
{{- /* A first part with a dot, a colon, or "localhost" is a registry: the one given stands in its place. */ -}}
{{- $parts := splitList "/" $image -}}
{{- if and (gt (len $parts) 1) (regexMatch "[.:]|^localhost$" (first $parts)) }}{{ $parts = rest $parts }}{{ end -}}
{{- $image = printf "%s/%s" (trimSuffix "/" .) (join "/" $parts) -}}
{{- end -}}
{{- $image -}}
{{- end }}

{{- define "triptych.serviceAccount" -}}
{{- if .root.Values.serviceAccount.create -}}
{{- default (include "triptych.fullname" .) .root.Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .root.Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* The address that servers bind to, and the pod's own with a port. */}}
{{- define "triptych.anyHost" -}}
{{- if eq .root.Values.ipFamily "ipv6" }}::{{ else }}0.0.0.0{{ end -}}
{{- end }}

{{- define "triptych.podAddress" -}}
{{- $port := include "triptych.port" (dict "spec" .spec "name" "grpc") -}}
{{- if eq .root.Values.ipFamily "ipv6" }}[$(POD_IP)]:{{ $port }}{{ else }}$(POD_IP):{{ $port }}{{ end -}}
{{- end }}

{{/* A port of a pool's pods by its name: one that the pool gives, else the usual one. */}}
{{- define "triptych.port" -}}
{{- $usual := dict "grpc" 50051 "embeddings" 50052 "metrics" 9100 "engine" 8000 -}}
{{- int (default (index $usual .name) (dig "ports" .name nil .spec)) -}}
{{- end }}

{{/* The ports `name` of all pools of `kinds`, as a YAML list; those of encoders in the pods of PD workers too. */}}
{{- define "triptych.poolPorts" -}}
{{- $ports := list -}}
{{- range $kind := .kinds -}}
{{- $defaults := ternary $.root.Values.encoder $.root.Values.pd (eq $kind "encoder") -}}
{{- range $pool := index $.root.Values (printf "%sPools" $kind) -}}
{{- $spec := dict "ports" (default $defaults.ports $pool.ports) -}}
{{- $ports = append $ports (include "triptych.port" (dict "spec" $spec "name" $.name) | int) -}}
{{- end -}}
{{- end -}}
{{- if include "triptych.podEncoders" . -}}
{{- $ports = append $ports (include "triptych.port" (dict "spec" (include "triptych.podEncoderPorts" . | fromYaml) "name" .name) | int) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end }}

{{/* A size like 4Gi in bytes. */}}
{{- define "triptych.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "" 1 -}}
{{- $number := regexFind "^[0-9]+" . -}}
{{- mul (int64 $number) (int64 (index $units (trimPrefix $number .))) -}}
{{- end }}

{{/* Names of the secrets: those given, or those that the chart makes. */}}
{{- define "triptych.internalSecret" -}}
{{- default (printf "%s-internal-token" (include "triptych.fullname" .)) .root.Values.internalToken.existingSecret -}}
{{- end }}

{{- define "triptych.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "triptych.fullname" .)) .root.Values.apiKeys.existingSecret -}}
{{- end }}

{{- define "triptych.storeSecret" -}}
{{- $own := "" -}}
{{- if eq .root.Values.store.mode "valkey" }}{{ $own = printf "%s-store" (include "triptych.fullname" .) }}{{ end -}}
{{- default $own .root.Values.store.existingSecret -}}
{{- end }}
