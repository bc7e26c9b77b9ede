"""The page at `/`: static files to try the models and watch the cluster."""
