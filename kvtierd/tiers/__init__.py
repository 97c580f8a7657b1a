"""The places where blocks live: the DRAM arena and the NVMe spill files.

Each tier is a payload (slabs of 4 KiB-aligned slots) and a header file that describes it:

    superblock.py   geometry and identity of a header file
    bodies.py       the 128-byte description of one block, and its checksum
    headers.py      a header file: superblock, slab directory, client table, words, bodies
    scan.py         what a header file says after a restart, believed only where it checks out
    arena.py        DRAM: sealed memfds, huge pages, lock, prefault
    memory.py       whether the host lets us have that memory, asked before it is touched
    holder.py       keeps memfds alive while no daemon runs (holder_process.py is the process)
    locks.py        directories that belong to one daemon alone

`docs/FORMATS.md` specifies the formats.
"""
