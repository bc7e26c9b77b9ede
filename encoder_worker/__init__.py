"""The encoder worker: plans and encodes multimodal items, saves their embeddings in the store."""
