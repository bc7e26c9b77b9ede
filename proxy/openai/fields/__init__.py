"""Fields of requests and replies that several endpoints share."""
