"""Autoscaling of the worker pools: demand, policy, and the loop that publishes decisions."""
