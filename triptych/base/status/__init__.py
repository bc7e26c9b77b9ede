"""The status pages of a process on --metrics-port: /metrics, /health and /ready."""
