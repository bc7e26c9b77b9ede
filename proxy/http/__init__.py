"""HTTP connections, bodies and errors, whatever the API."""
