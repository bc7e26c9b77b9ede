"""Micro-benchmarks of the parts, each a module with `main(arguments)`; results in `results/`."""
