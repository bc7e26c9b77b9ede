"""Runnable examples; no part of the installed package."""
