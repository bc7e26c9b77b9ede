"""The multimodal items of requests: one record each, their loads, and their stage of a step."""
