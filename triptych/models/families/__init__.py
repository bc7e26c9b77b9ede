"""One file per model family, with both its sides, and the layers they share."""
