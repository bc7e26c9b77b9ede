"""Where workers go: devices, memory, cores."""
