"""What runs in a process of its own, some of it by another environment's Python: nothing of anlit is imported here."""
