"""API keys: who a request comes from, and the limits of that principal."""
