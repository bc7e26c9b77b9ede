"""The proxy's live data: the cluster as it is now and was for 15 minutes, and where its requests spend time."""
