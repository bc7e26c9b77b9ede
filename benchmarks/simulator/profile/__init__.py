"""Costs measured on this machine."""
