"""What steps and transfers cost."""
