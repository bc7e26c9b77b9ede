"""A pool of encoders that follows its work, on one machine: bursts, starts from zero, a time line."""
