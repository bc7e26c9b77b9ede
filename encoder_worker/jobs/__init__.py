"""Encoder jobs: their state, the proxies' streams, and the way of items through tower and store."""
