"""Scheduling without torch: requests, token budget, encoder cache, KV blocks."""
