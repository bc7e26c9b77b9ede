"""Results: figures, windows, comparisons, plots."""
