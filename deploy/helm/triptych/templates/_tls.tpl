{{/* The Secret with a component's certificate: tls.crt, tls.key and ca.crt. One for all, but for cert-manager's. */}}
{{- define "triptych.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.existingSecret -}}
{{- $tls.existingSecret -}}
{{- else if $tls.certManager.issuerRef -}}
{{- include "triptych.name" (dict "root" .root "component" .component) }}-tls
{{- else -}}
{{- include "triptych.fullname" . }}-tls
{{- end -}}
{{- end }}

{{/* The Secret with the certificate of the front door; none where it has no TLS. */}}
{{- define "triptych.frontDoorSecret" -}}
{{- $door := .root.Values.proxy.frontDoorTls -}}
{{- if $door.existingSecret -}}
{{- $door.existingSecret -}}
{{- else if $door.certManager.issuerRef -}}
{{- include "triptych.name" (dict "root" .root "component" "proxy") }}-http-tls
{{- end -}}
{{- end }}

{{- define "triptych.tlsFlags" -}}
{{- if .root.Values.tls.enabled }}
- --tls-cert-file
- /etc/triptych/tls/tls.crt
- --tls-key-file
- /etc/triptych/tls/tls.key
- --tls-ca-file
- /etc/triptych/tls/ca.crt
{{- end }}
{{- end }}

{{/* cert-manager's Certificate for `hosts`, with its private key changed at every renewal. */}}
{{- define "triptych.certificate" -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "triptych.metadata" (dict "root" .root "object" .secret) | nindent 2 }}
spec:
  secretName: {{ .secret }}
  issuerRef:
    {{- toYaml .issuer.issuerRef | nindent 4 }}
  duration: {{ default "2160h" .issuer.duration }}
  renewBefore: {{ default "720h" .issuer.renewBefore }}
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
  usages: [{{ join ", " .usages }}]
  dnsNames:
    {{- range .hosts }}
    - {{ . | quote }}
    {{- end }}
{{- end }}

{{/* Where a TLS store's CA and the client's certificate are: the store that the chart runs has those of the cluster. */}}
{{- define "triptych.storeTlsFlags" -}}
{{- $values := .root.Values -}}
{{- if eq $values.store.mode "valkey" }}
{{- if $values.tls.enabled }}
- --store-ca-file
- /etc/triptych/tls/ca.crt
- --store-cert-file
- /etc/triptych/tls/tls.crt
- --store-key-file
- /etc/triptych/tls/tls.key
{{- end }}
{{- else }}
{{- if $values.store.external.caSecret }}
- --store-ca-file
- /etc/triptych/store-ca/ca.crt
{{- end }}
{{- if $values.store.external.clientSecret }}
- --store-cert-file
- /etc/triptych/store-client/tls.crt
- --store-key-file
- /etc/triptych/store-client/tls.key
{{- end }}
{{- end }}
{{- end }}
