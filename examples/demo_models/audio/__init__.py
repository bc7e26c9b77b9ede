"""The model that writes down dialled digits: a small Whisper."""
