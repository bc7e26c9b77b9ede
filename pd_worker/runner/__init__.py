"""One step on the device: batch, model, sampler."""
