"""KV blocks: pool, prefix cache, cross-attention tables, swap space."""
