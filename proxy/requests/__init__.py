"""The life of a request: its state machine and what it holds."""
