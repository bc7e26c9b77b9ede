"""A checkpoint folder: its files, and whether it can be served."""
