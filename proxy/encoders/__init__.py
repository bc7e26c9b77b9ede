"""Encoder jobs: the table of items, their order, the streams to the encoder workers."""
