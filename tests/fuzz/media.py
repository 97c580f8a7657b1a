"""Inputs that are damage: edits to the arenas, the spill file's headers and the catalog of a host.

Each input is a MessagePack array of edits. They hit a host that has lived a fixed life; then its
daemon is killed and starts on what is left. Edits to records are sealed again with the right
checksum, so that they reach what lies behind it.
"""

import sqlite3
import struct
from collections import Counter
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import msgspec
import numpy as np
import xxhash

from kvtierd.catalog.errors import CatalogError
from kvtierd.tiers.bodies import BODY_WORDS, seal_bodies
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.records import parse_keys
from kvtierd.tiers.superblock import CLIENTS_MAX, RECORD_BYTES
from tests.fuzz import grammar, machine, script
from tests.fuzz.grammar import Dice, Mutate
from tests.fuzz.machine import Machine

RAW, SUPERBLOCK, SLAB, CLIENT, WORD, BODY, CELL, DATABASE, CUT = range(9)
KINDS = 9
EDITS_MAX = 40
LIFE_SEED, LIFE_STEPS = 7, 120
INTERESTING = [0, 1, 2, 3, 5, 15, 16, 255, 256, 4095, 4096, 8192, 32768, 65535, 65536,
               2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**56, 2**63, 2**64 - 1]  # fmt: skip
SUPERBLOCK_SUMMED = 104
RECORD_SUMMED = 56
_Q = struct.Struct("<Q")


class Image:
    """What lies on a host's media after its life: header files and the catalog's changes."""

    def __init__(self) -> None:
        with machine.installed(lambda: host), machine.running(host := Machine()):
            run = script.Run(host)
            for step in script.decode(grammar.life(Random(LIFE_SEED), LIFE_STEPS)):
                run.take(step)
            host.notebook.write()
            self.headers = [_contents(file.fd) for file in _files(host)]
            self.ops = list(host.notebook.ops)
            self.pages = host.disk.pages.copy()
            self.pids = list(host.pids)
            host.close()


def _files(host: Machine) -> list[Any]:
    return [host.arenas["a"].headers, host.arenas["b"].headers, host.disk.headers]


def _contents(fd: int) -> bytes:
    return machine.os.pread(fd, machine.os.fstat(fd).st_size, 0)


class MediaTarget:
    """Damaged media at a start of the daemon."""

    unit = "starts"
    input_bytes = 4096

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._image = Image()
        self._machine: Machine | None = None

    def set_up(self) -> AbstractContextManager[None]:
        return machine.installed(self._current)

    def _current(self) -> Machine:
        assert self._machine is not None
        return self._machine

    def draw(self, dice: Dice) -> bytes:
        return script.encode([_edit(dice) for _ in range(dice.choice((1, 1, 2, 4, 8)))])

    def mutate(self, data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
        edits = _edits(data)
        if not edits or dice.random() < 0.05:
            return change(data, size) if data else self.draw(dice)
        at = dice.randrange(len(edits))
        draw = dice.random()
        if draw < 0.4:
            edits.insert(at, _edit(dice))
        elif draw < 0.5 and len(edits) > 1:
            del edits[at]
        else:
            edits[at][dice.randrange(5)] = _number(dice)
        return script.encode(edits[:EDITS_MAX])[:size]

    def take(self, data: bytes) -> None:
        host = self._machine = Machine()
        self.counts["starts"] += 1
        try:
            with machine.running(host):
                self._damage(host, _edits(data)[:EDITS_MAX])
                self._start(host)
        finally:
            host.close()

    def _start(self, host: Machine) -> None:
        """The daemon starts and serves, or says why it does not."""
        try:
            parse_keys(host.disk.headers.key_table())  # where an arena has its client table
            host.restart()
        except (StartError, CatalogError):
            self.counts["refused"] += 1
            return
        host.check()
        run = script.Run(host)
        for step in AFTERWARDS:
            run.take(step)
        host.check()
        host.drain()
        self.counts["served"] += 1

    def _damage(self, host: Machine, edits: list[list[int]]) -> None:
        images = [bytearray(image) for image in self._image.headers]
        headers = _files(host)
        cells: list[list[int]] = []
        for edit in edits:
            kind, file = edit[0] % KINDS, edit[1] % len(images)
            if kind in (CELL, DATABASE):
                cells.append(edit)
            else:
                _change(images[file], headers[file].geometry, kind, *edit[2:5])
        for file, image in zip(headers, images, strict=True):
            machine.os.ftruncate(file.fd, max(len(image), machine.os.fstat(file.fd).st_size))
            machine.os.pwrite(file.fd, image, 0)
            if len(image) != file.geometry.header_bytes:
                machine.os.ftruncate(file.fd, len(image))
        host.disk.pages[:] = self._image.pages
        host.notebook.ops = list(self._image.ops)
        host.notebook.spoil = lambda catalog: spoil(catalog, cells)


def _edits(data: bytes) -> list[list[int]]:
    try:
        found = script.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        found = [[RAW, at % 3, at * 97, byte, 0] for at, byte in enumerate(data)]
    return [
        [x % 2**64 if type(x) is int else 0 for x in (*edit, 0, 0, 0, 0, 0)][:5]
        for edit in (found if isinstance(found, list) else [])
        if isinstance(edit, list)
    ]


def _edit(dice: Dice) -> list[int]:
    return [dice.randrange(KINDS), dice.randrange(3), _number(dice), _number(dice), _number(dice)]


def _number(dice: Dice) -> int:
    return dice.choice((dice.randrange(16), dice.randrange(256), dice.choice(INTERESTING)))


def _change(image: bytearray, cut: Any, kind: int, at: int, field: int, value: int) -> None:
    """One edit of a header file."""
    if kind == CUT:
        del image[at * 64 % (len(image) + 1) :]
        if field % 2:
            image += bytes(value % 8192)
        return
    if kind == RAW:
        place = (at << 8 | field & 0xFF) % max(len(image), 1)
        image[place : place + 1] = bytes([value & 0xFF])
        return
    if kind == SUPERBLOCK:
        _sealed(image, 0, SUPERBLOCK_SUMMED, 8 + field % 24 * 4, value)
    elif kind == SLAB:
        start = cut.directory_offset + at % cut.slabs * RECORD_BYTES
        _sealed(image, start, RECORD_SUMMED, field % 14 * 4, value)
    elif kind == CLIENT:
        start = cut.clients_offset + at % CLIENTS_MAX * RECORD_BYTES
        _sealed(image, start, RECORD_SUMMED, field % 14 * 4, value)
    elif kind == WORD:
        start = cut.words_offset + at % cut.total_slots * 8 + field % 8
        image[start : start + 1] = bytes([value & 0xFF])
    elif kind == BODY:
        _body(image, cut.bodies_offset + at % cut.total_slots * 8 * BODY_WORDS, field, value)


def _sealed(image: bytearray, start: int, summed: int, at: int, value: int) -> None:
    """Change four bytes of a record, and make its checksum right."""
    if len(image) < start + summed + 8:
        return
    image[start + at : start + at + 4] = _Q.pack(value)[:4]
    digest = xxhash.xxh3_64_intdigest(bytes(image[start : start + summed]))
    image[start + summed : start + summed + 8] = _Q.pack(digest)


def _body(image: bytearray, start: int, field: int, value: int) -> None:
    """Change a word of a body, or a quarter of it, and make its checksum right."""
    size = 8 * BODY_WORDS
    if len(image) < start + size:
        return
    body = np.frombuffer(bytes(image[start : start + size]), np.uint64).reshape(1, -1).copy()
    word, quarter = 1 + field % (BODY_WORDS - 1), field // 16 % 5
    if quarter:
        body.view("<u2")[0, word * 4 + quarter - 1] = value & 0xFFFF
    else:
        body[0, word] = value
    seal_bodies(body)
    image[start : start + size] = body.tobytes()


def spoil(catalog: Any, edits: list[list[int]]) -> None:
    """Edit cells of a catalog's tables, or bytes of its file."""
    db: sqlite3.Connection = catalog._db
    for kind, _, at, field, value in edits:
        if kind % KINDS == DATABASE:
            image = bytearray(db.serialize())
            image[(at << 8 | field & 0xFF) % len(image)] = value & 0xFF
            db.deserialize(bytes(image))
            continue
        try:
            _spoil_cell(db, at, field, value)
        except (sqlite3.Error, OverflowError, ValueError):
            continue  # a constraint holds, or the file is no database any more


def _spoil_cell(db: sqlite3.Connection, at: int, field: int, value: int) -> None:
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = tables[at % len(tables)]
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    column = columns[field % len(columns)]
    cell: Any = (value, -value, b"", _Q.pack(value & 2**64 - 1) * 2, "", str(value), 0.5, 1e308)[
        field // 8 % 8
    ]
    rows = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    key = db.execute(
        f"SELECT {column} FROM {table} LIMIT 1 OFFSET ?", (at // 8 % max(rows, 1),)
    ).fetchone()
    if key is not None:
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {column} IS ?", (cell, *key))


def _afterwards() -> list[Any]:
    """What clients do on a host that has just started: resume, read, write."""
    dice, steps = Random(11), []
    for line in (0, 4):
        steps += [
            [script.FRAME, line, ["register_layout", None, layout]] for layout in script.LAYOUTS[:3]
        ]
        for token in script.TOKENS[:2]:
            steps.append([script.FRAME, line, ["resume_session", None, token]])
            session = script.given("session", 0)
            acquire = ["acquire", None, len(steps), session, 0, script.PRINTS[0], 0, 8, 1.0]
            steps += [[script.FRAME, line, acquire], [script.DISK, 0, 0, 0]]
        steps += grammar.swap(dice, line)
        steps += grammar.keyed(dice, line)
    steps.append([script.TIME, 5])
    return steps


AFTERWARDS = _afterwards()
