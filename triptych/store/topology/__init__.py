"""Topologies of the store: one server, a primary that Sentinels name, a Redis Cluster."""
