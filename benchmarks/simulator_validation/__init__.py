"""Measured clusters beside simulated ones."""
