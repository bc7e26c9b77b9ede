"""Metrics, dashboards and alerts: what the docs, the chart and the tests know of them."""
