"""Attention over block tables, registered with transformers."""
