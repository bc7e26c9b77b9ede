"""How much the proxy relays on one core."""
