"""The fork server: a process that has imported torch and transformers, and forks workers on request."""
