"""The front door: HTTP and gRPC, split, hash, admit, route, retry, stream. Holds no model."""
