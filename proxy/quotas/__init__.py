"""API keys: the principal of a request, and its limits."""
