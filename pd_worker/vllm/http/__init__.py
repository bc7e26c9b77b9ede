"""The HTTP client of a vLLM server: its token endpoint, its replies, its failures."""
