"""The tests, as a package so that their helpers can be imported by name."""
