"""Run folders as they lie on the disk: reading them, and which belong together; no torch."""
