"""The PD worker: loads embeddings, prefills and decodes. Never sees a pixel."""
