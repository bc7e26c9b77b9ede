"""Access to the store: what each role runs there, the users for it, and a check of a store."""
