"""The decode worker: its model, its scheduler, and its swapping to a real daemon."""
