"""PD workers whose engine is a vLLM server, reached by HTTP."""
