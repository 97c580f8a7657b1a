"""Mutants: the product with one protection taken away, and the tests that must notice."""
