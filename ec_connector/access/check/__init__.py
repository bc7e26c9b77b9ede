"""A check of a store: what it is, how fast it is, who may use it, and what to change."""
