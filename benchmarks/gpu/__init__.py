"""Benchmarks in absolute time on a CUDA device; `--device cpu` runs them at small size."""
