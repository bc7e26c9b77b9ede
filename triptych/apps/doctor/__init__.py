"""`triptych doctor`: checks whether a machine, its store and a cluster fit the given flags."""
