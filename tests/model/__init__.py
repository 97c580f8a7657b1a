"""The core against a model: random histories on simulated media."""
