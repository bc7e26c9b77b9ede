"""Secrets: handed to child processes, and hidden from all other processes."""
