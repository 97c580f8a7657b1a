"""The adapters of inference engines, and the examples, against a real daemon."""
