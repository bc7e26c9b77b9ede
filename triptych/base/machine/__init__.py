"""What the machine has: memory, cgroup limits, devices and their faults."""
