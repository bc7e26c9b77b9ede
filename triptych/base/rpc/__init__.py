"""gRPC channels and servers, and proofs of the internal token."""
