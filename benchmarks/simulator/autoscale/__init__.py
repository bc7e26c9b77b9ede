"""Autoscaling in virtual time: traces, scalers, an elastic pool of encoders."""
