"""Refusals: what the proxy turns away at the door, counted and logged."""
