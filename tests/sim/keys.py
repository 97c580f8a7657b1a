"""What an actor does with blocks that are named by content keys."""

import numpy as np

from tests.sim.clock import Failure
from tests.sim.hand import KEYED, KEYS, Hand


class Keys(Hand):
    """The keyed verbs."""

    def _keys(self) -> list[bytes]:
        first = self.random.randrange(len(KEYS))
        return KEYS[first : first + self.random.randint(1, 4)]

    async def put_keys(self) -> None:
        keys = self._keys()
        records = np.empty((len(keys), KEYED.block_bytes // 8), np.uint64)
        for i, key in enumerate(keys):
            records[i] = self.truth.fresh()
            self.truth.keys.setdefault((self.tenant, key), set()).add(int(records[i, 0]))
        await self.client.put_keys(KEYED, keys, records, wait_s=1.0)

    async def get_keys(self) -> None:
        keys = self._keys()
        if self.mine().holds and self.sim.chance(0.5):
            keys = sorted(self.mine().holds)
        await self.read_keys(keys)

    async def read_keys(self, keys: list[bytes]) -> None:
        """Read keyed blocks back; those that the session holds must be there."""
        records = np.zeros((len(keys), KEYED.block_bytes // 8), np.uint64)
        held = set(self.mine().holds)
        hits = await self.client.get_keys(KEYED, keys, records, wait_s=self.wait_s)
        for key, record in zip(keys[:hits], records, strict=False):
            possible = self.truth.keys.get((self.tenant, key), set())
            if int(record[0]) not in possible or not (record == record[0]).all():
                raise Failure(f"key {key!r} reads {record[0]}, not one of {possible}")
        if hits < len(keys) and keys[hits] in held & self.mine().holds:
            possible = self.truth.keys.get((self.tenant, keys[hits]), set())
            if not possible & self.medium.hurt:
                raise Failure(f"key {keys[hits]!r} is held and gone")

    async def hold(self) -> None:
        keys = self._keys()
        count = await self.handle.hold(KEYED, keys)
        self.mine().holds |= set(keys[:count])

    async def unhold(self) -> None:
        self.mine().holds.clear()
        await self.handle.unhold(KEYED, KEYS)

    async def remove(self) -> None:
        await self.client.remove(KEYED, self._keys())
