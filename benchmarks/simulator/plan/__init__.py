"""What to buy: the best shape for a load, its cost, what it is sensitive to, and how far it scales."""
