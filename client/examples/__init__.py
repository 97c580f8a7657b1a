"""Programs to read and to run: how an engine, and how a researcher, uses kvtierd."""
