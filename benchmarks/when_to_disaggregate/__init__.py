"""What encoder disaggregation is worth, and where: the figures of `docs/when-to-disaggregate.md`."""
