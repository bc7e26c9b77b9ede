"""KV blocks of prompts in the store: what one PD worker has computed, others load."""
