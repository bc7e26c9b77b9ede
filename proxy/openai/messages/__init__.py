"""POST /v1/messages and /v1/messages/count_tokens, in the shapes of Anthropic's API."""
