"""Real daemons for these tests."""

from tests.support.fixtures import client, daemon, make_daemon, shared_daemon

__all__ = ["client", "daemon", "make_daemon", "shared_daemon"]
