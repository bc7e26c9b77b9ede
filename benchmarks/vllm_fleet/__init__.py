"""Our encoder workers, store and proxy in front of vLLM servers, against vLLM alone on the same cores."""
