"""Request fields that several endpoints share."""
