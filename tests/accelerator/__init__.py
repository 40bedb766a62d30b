"""A run on a device that is not the CPU, on machines that have none: what would fail there, or wait for it."""
