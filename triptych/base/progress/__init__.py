"""Progress of long work: steps, the time they have left, and how people see them."""
