"""The daemon's pure core: requests, completions and time come in, replies and actions go out.

Nothing here does I/O, reads a clock or waits. The tables are numpy columns; the words of slots
are arrays that the caller hands in, so that they may live in a shared header file.
"""
