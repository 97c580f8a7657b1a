"""kvtierd beside other stores of the same bytes on the same host: `make bench-peers`."""
