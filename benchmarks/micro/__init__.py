"""Benchmarks of one part each."""
