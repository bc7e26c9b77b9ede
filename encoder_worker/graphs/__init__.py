"""Encoder graphs: tower calls of a few fixed sizes, captured at the start and replayed."""
