"""Encoder jobs of this worker: state, streams to the proxies, leases."""
