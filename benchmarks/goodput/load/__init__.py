"""Load: arrivals, prompts, pictures, clients."""
