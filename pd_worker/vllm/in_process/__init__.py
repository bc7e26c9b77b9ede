"""vLLM's AsyncLLM in this process. `async_client` and `start` alone import vLLM, once it is asked for."""
