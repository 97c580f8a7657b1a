"""Benchmarks: ratios to a reference that runs in the same minute; `make bench`, never a test."""
