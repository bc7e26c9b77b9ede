"""Encoder jobs: their state, the streams that wait for them, look-ups, tower batches and saves."""
