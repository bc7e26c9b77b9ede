"""Makes the OpenAPI document that the proxy serves as a file."""
