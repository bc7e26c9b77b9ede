{{/* Rules that several NetworkPolicies have. The kubelet's probes come from the node, which policies do not stop. */}}

{{- define "triptych.fromPrometheus" -}}
- ports:
    - {port: metrics, protocol: TCP}
  from:
    {{- toYaml .root.Values.networkPolicy.prometheus | nindent 4 }}
{{- end }}

{{- define "triptych.toDns" -}}
- ports:
    {{- range .root.Values.networkPolicy.dns.ports }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .root.Values.networkPolicy.dns.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "triptych.toStore" -}}
{{- $values := .root.Values -}}
{{- if eq $values.store.mode "valkey" -}}
- ports:
    - {port: 6379, protocol: TCP}
  to:
    - podSelector:
        matchLabels:
          {{- include "triptych.selector" (dict "root" .root "component" "store") | nindent 10 }}
{{- else -}}
- ports:
    {{- /* Those of the URL too; Sentinels name further servers, whose ports only the values know. */}}
    {{- $url := $values.store.external.url }}
    {{- $ports := $values.store.external.ports }}
    {{- range regexFindAll ":[0-9]+([,/?]|$)" $url -1 }}{{ $ports = append $ports (regexFind "[0-9]+" . | int) }}{{ end }}
    {{- if contains "+sentinel://" $url }}{{ $ports = append $ports 26379 }}{{ end }}
    {{- range $ports | toStrings | uniq }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with $values.networkPolicy.store }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end }}

{{/* The pods of these kinds that serve embeddings, or read them there; none where no pool is of one. */}}
{{- define "triptych.embeddingPeers" -}}
{{- range $kind := .kinds }}
{{- if index $.root.Values (printf "%sPools" $kind) }}
- podSelector:
    matchLabels:
      {{- include "triptych.selector" (dict "root" $.root "component" $kind) | nindent 6 }}
{{- end }}
{{- end }}
{{- include "triptych.nodes" . }}
{{- end }}

{{/* The nodes' addresses, where pods of any pool of `kinds` are on their nodes' network: no selector of pods finds those. */}}
{{- define "triptych.nodes" -}}
{{- $found := false -}}
{{- range $kind := .kinds -}}
{{- $defaults := ternary $.root.Values.encoder $.root.Values.pd (eq $kind "encoder") -}}
{{- range $pool := index $.root.Values (printf "%sPools" $kind) -}}
{{- if ternary $pool.hostNetwork $defaults.hostNetwork (hasKey $pool "hostNetwork") }}{{ $found = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $found -}}
{{- if not .root.Values.networkPolicy.nodes -}}
{{- fail "hostNetwork with networkPolicy.enabled needs networkPolicy.nodes: the networks of the nodes, like 10.0.0.0/16, from which such pods connect" -}}
{{- end -}}
{{- range .root.Values.networkPolicy.nodes }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end -}}
{{- end }}

{{/* The collector of spans, at the port of its URL. */}}
{{- define "triptych.toCollector" -}}
{{- with .root.Values.tracing.endpoint -}}
{{- $port := regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" -}}
- ports:
    - {port: {{ default (ternary "443" "80" (hasPrefix "https:" .)) $port }}, protocol: TCP}
  {{- with $.root.Values.networkPolicy.collector }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end }}

{{/* Every public address: nothing of the cluster, of private networks, or of the cloud's metadata. */}}
{{- define "triptych.toInternet" -}}
{{- $internet := .root.Values.networkPolicy.internet -}}
- ports:
    {{- range .ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except:
          {{- toYaml $internet.except | nindent 10 }}
    - ipBlock:
        cidr: ::/0
        except:
          {{- toYaml $internet.exceptIPv6 | nindent 10 }}
{{- end }}

{{/* Where models are downloaded from. */}}
{{- define "triptych.toHub" -}}
{{- include "triptych.toInternet" (dict "root" .root "ports" (list 443)) }}
{{- with .root.Values.networkPolicy.downloadEgress }}
{{ toYaml . }}
{{- end }}
{{- end }}
