"""The small reasoning model that ships: its task, its training from scratch, its weights."""
