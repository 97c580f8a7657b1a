"""kvtierd: the swap device for KV cache, a daemon that owns pinned DRAM and NVMe spill files."""

__version__ = "0.1.0"
