"""The vLLM engine as this worker calls it, whether it is a server or in this process."""
