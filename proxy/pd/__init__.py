"""PD workers as the proxy sees them: submits, event streams, losses."""
