"""What prefill before all items are there is worth: simulated, and measured on one machine."""
