"""Secrets handed to child processes, hidden from others."""
