"""The EC connector: the bridge between an engine and the embedding store, in two roles."""
