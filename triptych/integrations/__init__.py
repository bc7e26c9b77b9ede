"""Integrations: parts of Triptych that other inference engines load. Nothing else imports them."""
