"""Cores of this machine and how processes share them."""
