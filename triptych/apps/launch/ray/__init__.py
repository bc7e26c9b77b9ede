"""Clusters on Ray: detached actors that each keep one service running; requests and embeddings pass it by."""
