"""Benchmarks of a host: daemons of their own against memcpy, fio and an echo in the same minute.

`suite.py` names them all; `kvtierctl bench` and `python -m tests.bench` run them. A benchmark is a
function from a `Plan` to figures. Each starts daemons of its own and never asks a running one.
"""
