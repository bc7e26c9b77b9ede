"""vLLM and Triptych on the same cores, in turns: the same requests, ratios round by round."""
