"""gRPC channels and servers, and the internal token that their calls carry."""
