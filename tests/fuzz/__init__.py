"""Hostile input of every kind: frames, files, sockets, users, directories."""
