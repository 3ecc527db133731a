"""Where bytes go: host memory, and devices."""
