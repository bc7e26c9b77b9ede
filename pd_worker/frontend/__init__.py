"""Requests in, text out: prompt, chat template, tokens, grammar, wire format."""
