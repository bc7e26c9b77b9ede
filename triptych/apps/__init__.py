"""What a user starts: the commands, the launcher, the Python client, the colocated replica, doctor."""
