"""Media of a request: fetched, checked, and kept until the request ends."""
