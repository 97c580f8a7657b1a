"""kvtierctl: what an operator asks a running daemon, or the files of a stopped one.

    main.py      the commands; start here
    errors.py    how an error becomes one line and an exit code
    output.py    tables for people
    views.py     the daemon's reports as tables
    check.py     `check`: all files of a stopped daemon, and what they say of each other
    check_spill.py, check_names.py   its parts: one spill directory; headers against the catalog

Heavy modules (numpy, rich, prometheus_client) are imported by the commands that need them.
"""
