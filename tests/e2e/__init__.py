"""The real daemon with its real clients."""
