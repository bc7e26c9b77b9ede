"""The proxy's live data: the cluster now and over 15 minutes, and where its requests spend time."""
