"""The whole daemon and several clients on a simulated clock, disk and socket; one seed, one run."""
