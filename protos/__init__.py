"""Generated protobuf and gRPC stubs; `make proto` regenerates them from the .proto files."""
