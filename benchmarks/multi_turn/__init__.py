"""Chats with pictures, turn by turn."""
