"""Fused layers: several operations of transformers' own modules as one, with the same results."""
