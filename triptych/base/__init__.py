"""What every process uses: values, errors, hashing, configuration, logs, metrics, traces, gRPC."""
