"""Traces: spans of requests in all services, exported over OTLP; without `--otlp-endpoint` there are none."""
