"""Model families: one file each, holding the encoder side and the decoder side."""
