"""Protobuf and gRPC stubs, which `make proto` generates from the .proto files; `convert` is by hand."""
