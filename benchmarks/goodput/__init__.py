"""Goodput of any server that speaks OpenAI's API: workloads, arrivals, load, statistics, search, results."""
