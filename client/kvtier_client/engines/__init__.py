"""Adapters that put kvtierd behind inference engines, one for each; they alone import torch.

An engine's adapter is imported by its own name, so that nobody pays for another's dependencies.
"""
