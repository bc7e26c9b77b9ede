{{/* A HorizontalPodAutoscaler of a component's Deployment. */}}
{{- define "triptych.hpa" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "triptych.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "triptych.name" . }}
  minReplicas: {{ .least }}
  maxReplicas: {{ .most }}
  metrics:
    {{- toYaml .metrics | nindent 4 }}
  {{- with .root.Values.autoscaling.hpa.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
