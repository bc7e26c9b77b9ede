"""Goodput of servers, and a simulator of the product: the distribution `triptych-bench`."""
