"""The catalog gives back what was committed, and says clearly when it cannot."""

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_client.wire import CACHED, HELD, NO_NODE, Layout
from kvtierd.catalog.errors import (
    CatalogBusy,
    CatalogDamaged,
    CatalogError,
    CatalogFormatError,
    CatalogFull,
)
from kvtierd.catalog.rows import (
    BlobRecord,
    DropNodes,
    DropSession,
    ForgetSession,
    Hold,
    LayoutRecord,
    NodeRecord,
    Op,
    SaveBlob,
    SaveIdle,
    SaveLayout,
    SaveNodes,
    SaveSession,
    SessionRecord,
    Unhold,
)
from kvtierd.catalog.store import FILE_NAME, FORMAT, Catalog
from kvtierd.catalog.writer import CatalogWriter
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.locks import LockedDirectory, lock_directory

WAIT_S = 20.0
A, B = b"a" * 16, b"b" * 16
LAYOUT = Layout("model", "float32", 2, 1, 8, 16, 4096)
FINGERPRINT = LAYOUT.fingerprint()
ROOT = NodeRecord(0, NO_NODE, 0, HELD, False)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LockedDirectory]:
    locked = lock_directory(str(tmp_path / "state"))
    yield locked
    locked.close()


@pytest.fixture
def catalog(directory: LockedDirectory) -> Iterator[Catalog]:
    opened = Catalog.open(directory)
    yield opened
    opened.close()


def opened(session: bytes = A, tenant: str = "t", **changes: object) -> SaveSession:
    values: dict[str, object] = {
        "name": "s", "priority": 3, "layouts": (FINGERPRINT, B), "created_s": 5.0, "since_seq": 7,
    }  # fmt: skip
    return SaveSession(tenant, session, **(values | changes))  # type: ignore[arg-type]


def record(session: bytes = A, tenant: str = "t", **changes: object) -> SessionRecord:
    values: dict[str, object] = {
        "name": "s", "priority": 3, "layouts": (FINGERPRINT, B), "since_seq": 7, "created_s": 5.0,
        "idle_s": 0.0, "closed": False, "nodes": [], "pruned": [], "blob_versions": {}, "holds": [],
    }  # fmt: skip
    return SessionRecord(tenant, session, **(values | changes))  # type: ignore[arg-type]


def stored(directory: LockedDirectory) -> list[SessionRecord]:
    """What another life of the daemon finds."""
    catalog = Catalog.open(directory)
    try:
        return catalog.load().sessions
    finally:
        catalog.close()


# ------------------------------------------------------------------ contents


def test_everything_that_was_committed_is_there_in_the_next_life(
    catalog: Catalog, directory: LockedDirectory
) -> None:
    instance = catalog.instance
    catalog.stamp(4, 3)
    child = NodeRecord(9, 0, 33, CACHED, True)
    catalog.apply(
        [
            SaveLayout("t", LAYOUT),
            opened(),
            SaveNodes("t", A, (ROOT, child)),
            SaveBlob("t", A, NO_NODE, 2, b"session"),
            SaveBlob("t", A, 9, 1, b""),
            Hold("t", A, FINGERPRINT, (A, B)),
            Unhold("t", A, FINGERPRINT, (A,)),
            SaveIdle((("t", A, 12.5),)),
        ]
    )
    catalog.close()
    again = Catalog.open(directory)
    snapshot = again.load()
    assert (snapshot.instance, snapshot.generation) == (instance, 4)
    assert snapshot.layouts == [LayoutRecord("t", FINGERPRINT, LAYOUT)]
    assert snapshot.sessions == [
        record(
            idle_s=12.5,
            nodes=[ROOT, child],
            blob_versions={NO_NODE: 2, 9: 1},
            holds=[(FINGERPRINT, B)],
        )
    ]
    assert again.get_blob("t", A, NO_NODE) == BlobRecord(2, b"session")
    assert again.get_blob("t", A, 9) == BlobRecord(1, b"")
    assert again.get_blob("t", A, 0) is None
    assert again.check() == []
    again.close()


def test_one_token_in_two_tenants_is_two_sessions(
    catalog: Catalog, directory: LockedDirectory
) -> None:
    catalog.apply([opened(tenant="t"), opened(tenant="u", priority=9)])
    catalog.apply([SaveBlob("t", A, 0, 1, b"mine"), DropSession("u", A)])
    assert catalog.get_blob("u", A, 0) is None
    assert catalog.get_blob("t", A, 0) == BlobRecord(1, b"mine")
    assert [(s.tenant, s.closed) for s in catalog.load().sessions] == [("t", False), ("u", True)]


def test_pruned_nodes_leave_their_ids_and_nothing_else(catalog: Catalog) -> None:
    catalog.apply(
        [
            opened(),
            SaveNodes("t", A, (ROOT, NodeRecord(1, 0, 4, HELD, False))),
            SaveBlob("t", A, 1, 1, b"gone"),
            DropNodes("t", A, (1, 77)),
        ]
    )
    [session] = catalog.load().sessions
    assert session.nodes == [ROOT]
    assert session.pruned == [1, 77], "also of a node that only headers had remembered"
    assert catalog.get_blob("t", A, 1) is None


def test_a_closed_session_is_a_tombstone_until_it_is_forgotten(catalog: Catalog) -> None:
    catalog.apply([opened(), SaveNodes("t", A, (ROOT,)), Hold("t", A, FINGERPRINT, (B,))])
    catalog.apply([DropSession("t", A), DropSession("t", B)])
    assert [(s.session, s.closed, s.nodes, s.holds) for s in catalog.load().sessions] == [
        (A, True, [], []),
        (B, True, [], []),
    ]
    catalog.apply([ForgetSession("t", A), ForgetSession("t", B)])
    assert catalog.load().sessions == []


def test_a_token_used_again_after_its_session_closed_starts_clean(catalog: Catalog) -> None:
    catalog.apply([opened(), SaveNodes("t", A, (ROOT,)), SaveIdle((("t", A, 9.0),))])
    catalog.apply([DropSession("t", A), opened(since_seq=100, created_s=6.0)])
    catalog.apply([ForgetSession("t", A)])
    assert catalog.load().sessions == [record(since_seq=100, created_s=6.0)]


def test_saving_a_session_again_keeps_its_age_and_what_belongs_to_it(catalog: Catalog) -> None:
    catalog.apply([opened(), SaveNodes("t", A, (ROOT,)), opened(priority=200, created_s=99.0)])
    assert catalog.load().sessions == [record(priority=200, nodes=[ROOT])]


names = st.sampled_from([("t", A), ("t", B), ("u", A)])
nodes = st.integers(0, 3)
changes: st.SearchStrategy[Op] = st.one_of(
    st.builds(lambda n, p: opened(n[1], n[0], priority=p), names, st.integers(0, 255)),
    st.builds(
        lambda n, k: SaveNodes(n[0], n[1], (NodeRecord(k, 0, k, HELD, False),)), names, nodes
    ),
    st.builds(lambda n, k: DropNodes(n[0], n[1], (k,)), names, nodes),
    st.builds(lambda n: DropSession(n[0], n[1]), names),
    st.builds(lambda n: ForgetSession(n[0], n[1]), names),
    st.builds(lambda n, k, v: SaveBlob(n[0], n[1], k, v, b"x"), names, nodes, st.integers(1, 9)),
    st.builds(lambda n: Hold(n[0], n[1], FINGERPRINT, (A, B)), names),
    st.builds(lambda n: Unhold(n[0], n[1], FINGERPRINT, (B,)), names),
)


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.lists(changes, max_size=6), max_size=6))
def test_batches_and_single_changes_end_alike(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Op]]
) -> None:
    results = []
    for grouped in (True, False):
        directory = lock_directory(str(tmp_path_factory.mktemp("catalog") / "state"))
        catalog = Catalog.open(directory)
        for batch in batches:
            for ops in [batch] if grouped else [[op] for op in batch]:
                catalog.apply(ops)
        assert catalog.check() == []
        results.append(catalog.load().sessions)
        catalog.close()
        assert stored(directory) == results[-1]
        directory.close()
    assert results[0] == results[1]


def test_many_sessions_load_completely(catalog: Catalog) -> None:
    count = 20_000
    ops: list[Op] = []
    for number in range(count):
        session = number.to_bytes(16, "big")
        ops += [opened(session), SaveNodes("t", session, (ROOT,))]
    catalog.apply(ops)
    sessions = catalog.load().sessions
    assert len(sessions) == count
    assert all(session.nodes == [ROOT] for session in sessions)


# -------------------------------------------------------------------- files


def test_a_failed_start_leaves_nothing_behind_and_a_good_one_private_files(
    directory: LockedDirectory,
) -> None:
    Catalog.open(directory).abandon(directory)
    assert os.listdir(directory.path) == []
    catalog = Catalog.open(directory)
    assert catalog.created
    for name in os.listdir(directory.path):
        assert stat.S_IMODE(os.stat(f"{directory.path}/{name}").st_mode) == 0o600
    catalog.close()
    again = Catalog.open(directory)
    again.abandon(directory)
    assert os.listdir(directory.path) == [FILE_NAME], "an existing catalog is not removed"


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
def test_power_durability_syncs_every_commit(
    directory: LockedDirectory, durability: str, level: int
) -> None:
    catalog = Catalog.open(directory, durability)  # type: ignore[arg-type]
    assert catalog._db.execute("PRAGMA synchronous").fetchone() == (level,)
    assert catalog._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    catalog.close()


def test_a_link_in_the_place_of_the_catalog_is_refused(
    directory: LockedDirectory, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").touch()
    os.symlink(tmp_path / "elsewhere", f"{directory.path}/{FILE_NAME}")
    with pytest.raises(StartError, match="regular file"):
        Catalog.open(directory)
    assert (tmp_path / "elsewhere").read_bytes() == b""


def test_looking_at_a_stopped_catalog_changes_no_file(directory: LockedDirectory) -> None:
    catalog = Catalog.open(directory)
    catalog.apply([opened()])
    # What a killed daemon leaves: a log that was never folded into the file.
    wal = Path(directory.path, FILE_NAME + "-wal").read_bytes()
    main = Path(directory.path, FILE_NAME).read_bytes()
    catalog.close()
    Path(directory.path, FILE_NAME).write_bytes(main)
    Path(directory.path, FILE_NAME + "-wal").write_bytes(wal)
    looking = Catalog.open_readonly(directory)
    assert looking.load().sessions == [record()]
    looking.close()
    assert Path(directory.path, FILE_NAME).read_bytes() == main
    assert Path(directory.path, FILE_NAME + "-wal").read_bytes() == wal
    assert sorted(os.listdir(directory.path)) == [FILE_NAME, FILE_NAME + "-wal"]


def test_looking_where_no_catalog_is_makes_none(directory: LockedDirectory) -> None:
    with pytest.raises(FileNotFoundError):
        Catalog.open_readonly(directory)
    assert os.listdir(directory.path) == []


# ------------------------------------------------------------------- damage


def damage(directory: LockedDirectory, at: int, data: bytes) -> None:
    with open(f"{directory.path}/{FILE_NAME}", "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("data", [b"not a database, but text " * 400, b"\0" * 4096])
def test_a_file_that_is_no_catalog_is_refused_and_kept(
    directory: LockedDirectory, data: bytes
) -> None:
    path = Path(directory.path, FILE_NAME)
    path.write_bytes(data)
    with pytest.raises(CatalogDamaged, match=FILE_NAME):
        Catalog.open(directory)
    assert path.read_bytes() == data


def test_another_programs_database_is_refused(directory: LockedDirectory) -> None:
    db = sqlite3.connect(f"{directory.path}/{FILE_NAME}")
    db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(CatalogDamaged, match="not a catalog of kvtierd; move it away"):
        Catalog.open(directory)


@pytest.mark.parametrize("version", [0, FORMAT + 1])
def test_another_format_is_refused(directory: LockedDirectory, version: int) -> None:
    Catalog.open(directory).close()
    db = sqlite3.connect(f"{directory.path}/{FILE_NAME}")
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(CatalogFormatError, match=f"format {version}, .*install the version"):
        Catalog.open(directory)


def test_broken_pages_are_a_typed_error_that_names_the_file_and_a_remedy(
    directory: LockedDirectory,
) -> None:
    catalog = Catalog.open(directory)
    catalog.apply([opened(n.to_bytes(16, "big")) for n in range(500)])
    catalog.close()
    size = os.stat(f"{directory.path}/{FILE_NAME}").st_size
    for page in range(4096, size, 4096):
        damage(directory, page, b"\xff" * 64)
    with pytest.raises(CatalogDamaged, match=rf"{FILE_NAME}.*restore it .*from a backup"):
        stored(directory)
    catalog = Catalog.open(directory)
    assert catalog.check() != []
    catalog.close()


def test_a_layout_that_is_not_its_fingerprint_is_damage(catalog: Catalog) -> None:
    catalog.apply([SaveLayout("t", LAYOUT)])
    catalog._db.execute("UPDATE layouts SET fingerprint = ?", (B,))
    with pytest.raises(CatalogDamaged, match="another fingerprint"):
        catalog.load()


def test_a_changed_blob_is_never_given_back(catalog: Catalog) -> None:
    catalog.apply([opened(), SaveBlob("t", A, 0, 1, b"state")])
    catalog._db.execute("UPDATE blobs SET data = ?", (b"stare",))
    with pytest.raises(CatalogDamaged, match="has changed"):
        catalog.get_blob("t", A, 0)
    assert len(catalog.check()) == 1


def test_rows_of_no_session_are_passed_over_and_reported(catalog: Catalog) -> None:
    catalog.apply([opened(), SaveNodes("t", A, (ROOT,)), SaveBlob("t", A, 0, 1, b"x")])
    catalog._db.execute("DELETE FROM sessions")
    assert catalog.load().sessions == []
    assert "2 nodes, blobs, holds or folds are of no session" in catalog.check()[0]


# ---------------------------------------------------------------- full disk


def fill(catalog: Catalog) -> None:
    """Let the database grow no further, as on a full disk."""
    [pages] = catalog._db.execute("PRAGMA page_count").fetchone()
    catalog._db.execute(f"PRAGMA max_page_count = {pages}")


def make_room(catalog: Catalog) -> None:
    catalog._db.execute("PRAGMA max_page_count = 1000000")


def test_a_full_disk_fails_the_whole_change_and_nothing_after_it(catalog: Catalog) -> None:
    catalog.apply([opened()])
    before = catalog.load()
    fill(catalog)
    with pytest.raises(CatalogFull, match="make room"):
        catalog.apply([opened(priority=9), SaveBlob("t", A, 0, 1, bytes(100_000))])
    assert catalog.load() == before
    make_room(catalog)
    catalog.apply([SaveBlob("t", A, 0, 1, bytes(100_000))])
    assert catalog.get_blob("t", A, 0) == BlobRecord(1, bytes(100_000))


# ------------------------------------------------------------------- writer


class Answers:
    """Collects what a writer calls back, and waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.got: dict[str, object] = {}

    def __call__(self, name: str, result: object) -> None:
        with self._changed:
            self.got[name] = result
            self._changed.notify_all()

    def wait(self, *names: str) -> list[object]:
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= set(self.got), WAIT_S)
            return [self.got[name] for name in names]


@pytest.fixture
def answers() -> Answers:
    return Answers()


def test_what_is_queued_is_written_in_order_and_read_back(
    directory: LockedDirectory, answers: Answers
) -> None:
    writer = CatalogWriter(Catalog.open(directory))
    writer.submit([opened()], lambda e: answers("open", e))
    writer.submit([SaveBlob("t", A, 0, 1, b"one")], lambda e: answers("one", e))
    writer.read_blob("t", A, 0, lambda r: answers("read one", r))
    writer.submit([SaveBlob("t", A, 0, 2, b"two")], lambda e: answers("two", e))
    writer.read_blob("t", A, 0, lambda r: answers("read two", r))
    writer.read_blob("t", A, 5, lambda r: answers("read none", r))
    writer.start()
    assert answers.wait("open", "one", "two", "read none") == [None, None, None, None]
    assert answers.wait("read one", "read two") == [BlobRecord(1, b"one"), BlobRecord(2, b"two")]
    assert writer.alive and writer.queued == 0
    assert writer.close()
    assert stored(directory) == [record(blob_versions={0: 2})]


def test_close_writes_what_is_queued_and_then_refuses(
    directory: LockedDirectory, answers: Answers
) -> None:
    writer = CatalogWriter(Catalog.open(directory))
    for number in range(100):
        writer.submit([opened(number.to_bytes(16, "big"))], lambda e: answers("last", e))
    writer.start()
    assert writer.close()
    assert len(stored(directory)) == 100
    with pytest.raises(CatalogBusy, match="closing"):
        writer.submit([opened()], lambda e: answers("late", e))


def test_a_full_queue_is_a_typed_refusal(directory: LockedDirectory, answers: Answers) -> None:
    writer = CatalogWriter(Catalog.open(directory), queue_ops=3)
    writer.submit([opened(), opened(B)], lambda e: answers("two", e))
    with pytest.raises(CatalogBusy, match="2 wait already"):
        writer.submit([opened(), opened(B)], lambda e: answers("more", e))
    writer.read_blob("t", A, 0, lambda r: answers("read", r))
    with pytest.raises(CatalogBusy):
        writer.read_blob("t", A, 0, lambda r: answers("read more", r))
    writer.start()
    assert answers.wait("two", "read") == [None, None]
    writer.submit([opened(), opened(B)], lambda e: answers("again", e))
    assert answers.wait("again") == [None]
    assert set(answers.got) == {"two", "read", "again"}
    assert writer.close()


def test_a_batch_that_does_not_fit_fails_alone_and_the_writer_goes_on(
    directory: LockedDirectory, answers: Answers
) -> None:
    catalog = Catalog.open(directory)
    catalog.apply([opened()])
    fill(catalog)
    writer = CatalogWriter(catalog)
    writer.submit([opened(priority=1)], lambda e: answers("small", e))
    writer.submit([SaveBlob("t", A, 0, 1, bytes(1_000_000))], lambda e: answers("large", e))
    writer.submit([opened(name="kept")], lambda e: answers("after", e))
    writer.start()
    small, large, after = answers.wait("small", "large", "after")
    assert isinstance(large, CatalogFull)
    assert (small, after) == (None, None)
    assert writer.close()
    assert stored(directory) == [record(name="kept")]


def test_what_nobody_expected_reaches_the_caller_and_not_the_thread(
    directory: LockedDirectory, answers: Answers
) -> None:
    writer = CatalogWriter(Catalog.open(directory))
    writer.start()
    writer.submit([object()], lambda e: answers("nonsense", e))  # type: ignore[list-item]
    [error] = answers.wait("nonsense")
    assert isinstance(error, CatalogError) and "KeyError" in str(error)

    def closed_loop(_: CatalogError | None) -> None:
        raise RuntimeError("Event loop is closed")

    writer.submit([opened()], closed_loop)
    writer.submit([opened(B)], lambda e: answers("next", e))
    assert answers.wait("next") == [None]
    assert writer.alive
    assert writer.close()
    assert len(stored(directory)) == 2
