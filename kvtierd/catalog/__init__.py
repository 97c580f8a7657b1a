"""The catalog: layouts, sessions, nodes, blobs and holds, in one SQLite file.

rows.py      what is stored, as structs: changes (`Op`) and records
changes.py   how each change is written
store.py     `Catalog`: open, apply, load, check
writer.py    `CatalogWriter`: changes and reads in a thread
errors.py    what can go wrong
"""
