"""One request as both front doors hand it on: messages, tools, output format, validated values."""
