"""Workers and leases as the store keeps them."""
