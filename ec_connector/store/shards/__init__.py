"""The shards of the store: the embeddings of one, and which of them holds an item."""
