"""Turns of the event loop among those who share it."""
