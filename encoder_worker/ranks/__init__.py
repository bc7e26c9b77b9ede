"""A tower in several ranks, data-parallel: each has all of its weights and encodes a share of every batch."""
