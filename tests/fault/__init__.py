"""Real processes, killed, stopped, starved and lied to.

`python -m tests.fault` kills many times.
"""
