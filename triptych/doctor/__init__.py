"""`triptych doctor`: what of a machine, its store and a cluster is fit for the flags that are given."""
