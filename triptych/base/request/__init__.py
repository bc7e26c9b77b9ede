"""A request as proxies and PD workers share it: messages, template options, limits of values."""
