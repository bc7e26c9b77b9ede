"""A published comparison beside the simulator's figures."""
