"""TLS of gRPC and HTTP: certificates from files, read again when those change."""
