"""The scaling policy beside others, in virtual time."""
