"""The baselines: systems side by side on the same loads, cell by cell, and the report made of them."""
