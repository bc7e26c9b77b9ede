"""Rates of loads and saves against the number of the store's shards, its topology and TLS."""
