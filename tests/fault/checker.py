"""What a daemon has acknowledged, and the proof after a restart that all of it is still there."""

import os

from tests.support import raw
from tests.support.raw import BLOCK_TOKENS, RawClient, from_u32, pattern

LAYOUT = raw.layout()
KNOWN = raw.fingerprint(LAYOUT)


class Promises:
    """Sessions and their acknowledged pages; `check` reads each of them back."""

    def __init__(self) -> None:
        self.tokens: dict[int, bytes] = {}
        self.pages: dict[int, dict[int, int]] = {}
        self.attempts: dict[int, dict[int, int]] = {}
        self._next_seed = 1

    def open(self, client: RawClient) -> int:
        """A new session."""
        token = os.urandom(16)
        session = client.open(LAYOUT, token)
        self.tokens[session], self.pages[session] = token, {}
        return session

    def resume(self, client: RawClient) -> None:
        """Open every session again, as a client does after a restart."""
        client.ask("register_layout", LAYOUT)
        for token in self.tokens.values():
            client.ask("resume_session", token)

    def seeds(self, session: int, count: int) -> dict[int, int]:
        """The next pages of a session and fresh seeds for them; they are not promised yet.

        What was tried and not answered comes again, for a page never changes under its name."""
        if session in self.attempts:
            return self.attempts[session]
        first = max(self.pages[session], default=-1) + 1
        seeds = {first + i: self._next_seed + i for i in range(count)}
        self._next_seed += count
        return seeds

    def swap_out(self, client: RawClient, session: int, count: int) -> None:
        """Store the next pages; they count once they were acknowledged."""
        self.attempts[session] = seeds = self.seeds(session, count)
        client.swap_out(KNOWN, session, 0, seeds)
        self.pages[session] |= self.attempts.pop(session)

    def check(self, client: RawClient) -> None:
        """Every acknowledged page is there, with its own bytes."""
        self.resume(client)
        for session, pages in self.pages.items():
            root = client.ask("describe", session)[8][0]
            stored = dict(zip(from_u32(root[6][0]), from_u32(root[7][0]), strict=True))
            assert set(pages) <= set(stored), sorted(set(pages) - set(stored))
            assert all(stored[page] == BLOCK_TOKENS for page in pages)
            tried = self.attempts.get(session, {})
            assert set(stored) - set(pages) <= set(tried)
            for page in set(stored) & set(tried):
                assert client.swap_in(KNOWN, session, 0, page, 1) == [pattern(tried[page])]
            if pages:
                found = client.swap_in(KNOWN, session, 0, 0, len(pages))
                wrong = [page for page, seed in pages.items() if found[page] != pattern(seed)]
                assert wrong == []

    def total(self) -> int:
        return sum(map(len, self.pages.values()))
