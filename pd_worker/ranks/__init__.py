"""A PD worker of several tensor-parallel ranks: steps to all of them, one result back."""
