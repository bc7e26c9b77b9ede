"""Videos: the checkpoint's own video processor, without torchvision."""
