"""The model that answers questions about drawn shapes: a small Qwen3-VL."""
