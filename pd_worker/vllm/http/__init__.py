"""The HTTP client of a vLLM server: its calls, its replies, its failures."""
