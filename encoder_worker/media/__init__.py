"""Media decoded and preprocessed on the CPU."""
