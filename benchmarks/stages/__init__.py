"""Each stage of a request in process, beside what the machine could do at best."""
