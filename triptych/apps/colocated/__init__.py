"""The colocated topology: an encoder worker and a PD worker in one process, on one device."""
