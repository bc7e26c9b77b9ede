"""Weights from checkpoints: loading, quantisation, prepacking."""
