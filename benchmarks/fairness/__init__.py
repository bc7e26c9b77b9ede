"""How long one key's small requests take while another key floods the cluster."""
