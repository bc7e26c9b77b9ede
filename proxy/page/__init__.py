"""The page at `/`: static files to try the models with and to watch the cluster by."""
