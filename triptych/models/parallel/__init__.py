"""Tensor parallelism of the decoder sides: how a model's weights are divided among the ranks of a worker."""
