"""The client library alone: protocol, shells, leases, copies and cost model."""
