"""What tests of several kinds share: a real daemon, a raw client, client processes, waiting."""
