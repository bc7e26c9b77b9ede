"""The connectors: Redis and in-process, and the parts they share."""
