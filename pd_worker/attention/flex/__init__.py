"""The FlexAttention backend for CUDA."""
