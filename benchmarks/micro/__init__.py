"""Programs that measure one part alone, in a process or two: `python -m benchmarks micro`."""
