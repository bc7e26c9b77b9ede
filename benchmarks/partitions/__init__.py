"""How long requests wait while hosts are cut off from each other."""
