"""Registrations of workers and proxies, and leases of items, in the store."""
