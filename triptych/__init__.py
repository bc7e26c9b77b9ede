"""Triptych: serving multimodal models with encode, prefill and decode taken apart."""

__version__ = "0.1.0"
