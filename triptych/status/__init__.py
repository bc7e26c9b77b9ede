"""What a process says of itself on --metrics-port: /metrics, /health and /ready."""
