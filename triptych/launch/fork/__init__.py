"""The process that has imported everything and forks workers."""
