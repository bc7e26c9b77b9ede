"""The embedding store: values, keys, bulk transfer, control commands."""
