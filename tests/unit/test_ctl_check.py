"""`kvtierctl check` passes sound files, finds every kind of damage, and changes nothing."""

import json
import os
import queue
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from click.testing import CliRunner, Result

from kvtier_client.wire import HELD, NO_NODE, Layout
from kvtierd.catalog.rows import (
    DropNodes,
    DropSession,
    Hold,
    NodeRecord,
    Op,
    SaveBlob,
    SaveLayout,
    SaveNodes,
    SaveSession,
)
from kvtierd.catalog.store import Catalog
from kvtierd.core.slabs import ready_words
from kvtierd.ctl.check import as_owner
from kvtierd.ctl.main import main
from kvtierd.tiers.bodies import BLOCK_KEYED, BLOCK_SESSION, BodyFields, compose
from kvtierd.tiers.locks import lock_directory
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.spill import SpillTier
from kvtierd.tiers.spill_io import WriteJob
from kvtierd.tiers.spill_open import open_spill
from kvtierd.tiers.superblock import (
    BODY_BYTES,
    KEY_COPIES,
    KEYS_MAX,
    RECORD_BYTES,
    Geometry,
    Kind,
)
from tests.spill_support import BLOCK_BYTES, MIB, WAIT_S, contents, new_arena, settings

TENANT = "default"
SESSION = bytes(range(100, 116))
LAYOUT = Layout("model", "float32", 1, 1, 128, 16, BLOCK_BYTES)
BLOCKS_PER_NODE = 3
SLOTS = MIB // BLOCK_BYTES

Blocks = list[tuple[bytes, int, int]]
"""Owner (16 bytes), node, kind of each block."""


def stored(session: bytes, *nodes: int, kind: int = BLOCK_SESSION) -> Blocks:
    return [(session, node, kind) for node in nodes for _ in range(BLOCKS_PER_NODE)]


def stopped_daemon(
    root: Path, blocks: Blocks, ops: list[Op], directories: int = 1, **changes: Any
) -> Path:
    """The files of a daemon that has stored `blocks` (in its first spill directory) and `ops`."""
    state = root / "state"
    directory = lock_directory(str(state))
    catalog = Catalog.open(directory)
    catalog.apply(ops)
    spill = [state / "spill", root / "second"][:directories]
    files = open_spill(settings(*spill, **changes), catalog.instance, 0)
    files.begin(1)
    tier = SpillTier(files)
    tenant = xxhash.xxh32_intdigest(TENANT.encode())
    tier.assign_slab(SlabEntry(0, LAYOUT.fingerprint(), tenant, BLOCK_BYTES, SLOTS, BLOCK_BYTES))
    if blocks:
        write(tier, blocks, tenant)
    assert tier.close(WAIT_S)
    catalog.stamp(1, len(spill))
    catalog.close()
    directory.close()
    return state


def write(tier: SpillTier, blocks: Blocks, tenant: int) -> None:
    count = len(blocks)
    seqs = np.arange(1, count + 1, dtype=np.uint64)
    arena = new_arena(4 * MIB)
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    arena[: count * BLOCK_BYTES] = contents(seqs, BLOCK_BYTES).reshape(-1)
    owners = np.frombuffer(b"".join(owner for owner, _, _ in blocks), np.uint64).reshape(-1, 2)
    low, high = np.frombuffer(LAYOUT.fingerprint(), np.uint64).tolist()
    fields = BodyFields(
        kind=Kind.ARENA, slot=0, owner0=owners[:, 0], owner1=owners[:, 1],
        node=np.array([node for _, node, _ in blocks], np.uint64), page=seqs, valid_tokens=16,
        length_bytes=BLOCK_BYTES, payload_sum=0, seq=seqs, layout0=low, layout1=high, lease=0,
        parent=0, fork_tokens=0, tenant=tenant,
        block_kind=np.array([kind for _, _, kind in blocks], np.uint64), retention=HELD,
        checksum_kind=0, priority=0, created_s=1, generation=1,
    )  # fmt: skip
    slots = np.arange(count, dtype=np.int64)
    job = WriteJob(slots, arena, offsets, BLOCK_BYTES, compose(count, fields), ready_words(seqs))
    results: queue.Queue[Any] = queue.Queue()
    tier.submit(job, results.put)
    assert results.get(timeout=WAIT_S).ok


def known(since_seq: int = 0) -> list[Op]:
    """What the catalog knows of SESSION: its root and node 4."""
    nodes = tuple(NodeRecord(number, NO_NODE, 0, HELD, False) for number in (0, 4))
    return [
        SaveLayout(TENANT, LAYOUT),
        SaveSession(TENANT, SESSION, "s", 0, (LAYOUT.fingerprint(),), 1.0, since_seq),
        SaveNodes(TENANT, SESSION, nodes),
        SaveBlob(TENANT, SESSION, 4, 1, b"sampler"),
        Hold(TENANT, SESSION, LAYOUT.fingerprint(), (bytes(16),)),
    ]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A sound daemon's files: a session of two nodes and some keyed blocks."""
    blocks = stored(SESSION, 0, 4) + stored(bytes(16), 0, kind=BLOCK_KEYED)
    return stopped_daemon(tmp_path, blocks, known())


def check(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, ["check", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def report(state: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = check("--state-dir", state, "--json", *arguments)
    return result.exit_code, json.loads(result.stdout)


def damages(state: Path) -> list[str]:
    """The damages of files that must be found damaged."""
    code, document = report(state)
    assert code == 40 and not document["ok"]
    assert document["damages"] == len(document["problems"]) > 0
    return document["problems"]  # type: ignore[no-any-return]


def soil(path: Path, offset: int) -> None:
    """Flip one bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


# -------------------------------------------------------------- sound files


def test_sound_files_pass_and_everything_is_counted(state: Path) -> None:
    code, document = report(state)
    assert (code, document["ok"], document["problems"], document["notes"]) == (0, True, [], [])
    assert document["catalog"] == {
        "sessions": 1, "closed_sessions": 0, "nodes": 2, "pruned_nodes": 0, "layouts": 1,
        "blobs": 1, "holds": 1,
    }  # fmt: skip
    assert document["blocks"] == {
        "session_blocks": 6, "keyed_blocks": 3, "orphan_blocks": 0, "orphan_sessions": 0,
        "stale_blocks": 0,
    }  # fmt: skip
    [spill] = document["spill"]
    assert (spill["blocks"], spill["payloads_verified"], spill["free_slots"]) == (9, 9, SLOTS - 9)
    assert spill["used_bytes"] == 9 * BLOCK_BYTES
    assert spill["used_bytes"] + spill["free_bytes"] + spill["slack_bytes"] == 4 * MIB
    assert document["generation"] == 1


def test_people_get_the_same_in_a_few_lines(state: Path) -> None:
    result = check("--state-dir", state)
    assert result.exit_code == 0
    assert "blocks: 6 of sessions, 3 keyed" in result.stdout
    assert result.stdout.endswith("\nok\n")


def test_quick_leaves_the_payloads_alone(state: Path) -> None:
    soil(state / "spill" / "blocks.kv", 5 * BLOCK_BYTES + 77)
    code, document = report(state, "--quick")
    assert code == 0 and document["spill"][0]["payloads_verified"] == 0


def test_a_configuration_names_all_directories(tmp_path: Path) -> None:
    state = stopped_daemon(tmp_path, stored(SESSION, 0), known(), directories=2)
    config = tmp_path / "kvtierd.toml"
    paths = json.dumps([str(state / "spill"), str(tmp_path / "second")])
    config.write_text(f'state_dir = "{state}"\n[spill]\npaths = {paths}\n')
    result = check("--config", config, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0, document
    assert [spill["blocks"] for spill in document["spill"]] == [3, 0]


def test_files_look_the_same_before_and_after(state: Path) -> None:
    def picture() -> dict[str, tuple[int, bytes]]:
        paths = [path for path in state.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before = picture()
    check("--state-dir", state)
    assert picture() == before


# -------------------------------------------------- headers against catalog


def test_blocks_of_closed_and_pruned_wait_to_be_cleared_and_are_no_damage(tmp_path: Path) -> None:
    closed = bytes(16)
    state = stopped_daemon(
        tmp_path,
        stored(SESSION, 0, 4) + stored(closed, 0),
        [*known(), DropNodes(TENANT, SESSION, (4,)), DropSession(TENANT, closed)],
    )
    code, document = report(state)
    assert code == 0
    assert (document["blocks"]["session_blocks"], document["blocks"]["stale_blocks"]) == (3, 6)
    assert document["catalog"]["pruned_nodes"] == document["catalog"]["closed_sessions"] == 1


def test_blocks_of_an_earlier_session_of_a_token_are_not_those_of_the_new_one(
    tmp_path: Path,
) -> None:
    state = stopped_daemon(tmp_path, stored(SESSION, 0, 4), known(since_seq=3))
    _, document = report(state)
    assert (document["blocks"]["session_blocks"], document["blocks"]["stale_blocks"]) == (4, 2)


def test_blocks_that_the_catalog_does_not_know_are_noted_as_orphans(tmp_path: Path) -> None:
    state = stopped_daemon(tmp_path, stored(SESSION, 0, 9) + stored(bytes(16), 0), known())
    code, document = report(state)
    assert code == 0
    assert document["blocks"]["orphan_blocks"] == 6
    assert document["blocks"]["orphan_sessions"] == 1
    assert (
        "6 blocks are of sessions or nodes that the catalog does not know" in document["notes"][0]
    )


def test_files_of_another_start_are_noted(state: Path) -> None:
    directory = lock_directory(str(state))
    catalog = Catalog.open(directory)
    catalog.stamp(9, 1)
    catalog.close()
    directory.close()
    code, document = report(state)
    assert code == 0
    assert "written by start 1, the catalog knows 9" in document["notes"][0]


# -------------------------------------------------------------------- damage


def test_every_flipped_bit_of_a_payload_is_found_where_it_is(state: Path) -> None:
    for slot in (0, 4, 8):
        soil(state / "spill" / "blocks.kv", slot * BLOCK_BYTES + 1000 * slot)
    assert [re.findall(r"slot (\d+): .*checksum", text) for text in damages(state)] == [
        ["0"], ["4"], ["8"],
    ]  # fmt: skip


def test_a_flipped_bit_in_a_header_is_found(state: Path) -> None:
    path = state / "spill" / "headers.kv"
    data = path.read_bytes()
    start = data.index(SESSION) - 8  # the first body: its checksum, then its owner
    soil(path, start + 2 * BODY_BYTES + 40)
    [problem] = damages(state)
    assert "slot 2: its header is not a block's" in problem


def test_a_cut_payload_is_found_and_its_blocks_named(state: Path) -> None:
    os.truncate(state / "spill" / "blocks.kv", 8 * BLOCK_BYTES)
    first, lost = damages(state)
    assert f"has {8 * BLOCK_BYTES} bytes instead of {4 * MIB}" in first
    assert "slot 8: its payload is missing" in lost


def test_a_missing_payload_is_found(state: Path) -> None:
    (state / "spill" / "blocks.kv").unlink()
    assert "blocks.kv is missing" in damages(state)[0]
    assert not (state / "spill" / "blocks.kv").exists()


def test_a_payload_without_headers_is_found(state: Path) -> None:
    (state / "spill" / "headers.kv").unlink()
    [problem] = damages(state)
    assert "blocks.kv without headers.kv" in problem


@pytest.mark.parametrize("offset", [0, 20, 60])
def test_a_damaged_superblock_is_found(state: Path, offset: int) -> None:
    soil(state / "spill" / "headers.kv", offset)
    [problem] = damages(state)
    assert "headers.kv" in problem


def test_a_damaged_slab_directory_is_found(state: Path) -> None:
    soil(state / "spill" / "headers.kv", 4096 + 3)
    assert any("slab 0 is unreadable" in problem for problem in damages(state))


def test_a_missing_spill_directory_is_found(state: Path) -> None:
    (state / "spill").rename(state / "elsewhere")
    [problem] = damages(state)
    assert "spill directory is missing" in problem
    assert not (state / "spill").exists()


def test_a_spill_directory_whose_files_are_gone_is_found(state: Path) -> None:
    (state / "spill" / "headers.kv").rename(state / "headers")
    (state / "spill" / "blocks.kv").rename(state / "blocks")
    [problem] = damages(state)
    assert "its files are gone" in problem


def test_a_spill_directory_that_is_not_named_is_found(tmp_path: Path) -> None:
    state = stopped_daemon(tmp_path, stored(SESSION, 0), [], directories=2)
    assert any("2 spill directories had files, and 1 are named" in text for text in damages(state))


def test_spill_files_of_another_daemon_are_found(state: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = stopped_daemon(tmp_path / "other", [], [])
    (state / "spill").rename(state / "mine")
    (other / "spill").rename(state / "spill")
    [problem] = damages(state)
    assert "instance" in problem


def test_a_damaged_catalog_is_found_and_the_headers_are_checked_all_the_same(state: Path) -> None:
    (state / "catalog.db").write_bytes(b"nothing that SQLite would know" * 300)
    soil(state / "spill" / "blocks.kv", 0)
    catalog, payload = damages(state)
    assert "catalog.db" in catalog and "checksum" in payload


def test_a_missing_catalog_beside_spill_files_is_damage(state: Path) -> None:
    (state / "catalog.db").unlink()
    [problem] = damages(state)
    assert "there is no catalog.db" in problem
    assert not (state / "catalog.db").exists()


def test_people_are_told_each_damage(state: Path) -> None:
    soil(state / "spill" / "blocks.kv", 0)
    result = check("--state-dir", state)
    assert result.exit_code == 40
    assert "DAMAGE: " in result.stdout and result.stdout.endswith("\n1 damages\n")


# ---------------------------------------------------------------- encryption


@pytest.fixture
def encrypted(tmp_path: Path) -> tuple[Path, Path]:
    """A sound daemon's files whose blocks are encrypted, and a configuration that names the key."""
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o400)
    blocks = stored(SESSION, 0, 4) + stored(bytes(16), 0, kind=BLOCK_KEYED)
    state = stopped_daemon(tmp_path, blocks, known(), encrypt=True, key=str(key))
    config = tmp_path / "kvtierd.toml"
    config.write_text(f'state_dir = "{state}"\n[spill.encryption]\nkey = "{key}"\n')
    return state, config


def test_encrypted_blocks_are_verified_with_their_key(encrypted: tuple[Path, Path]) -> None:
    result = check("--config", encrypted[1], "--json")
    [spill] = json.loads(result.stdout)["spill"]
    assert result.exit_code == 0
    assert (spill["encrypted_blocks"], spill["payloads_verified"]) == (9, 9)


def test_a_flipped_bit_of_an_encrypted_payload_is_found(encrypted: tuple[Path, Path]) -> None:
    soil(encrypted[0] / "spill" / "blocks.kv", 4 * BLOCK_BYTES + 77)
    result = check("--config", encrypted[1])
    assert result.exit_code == 40
    assert result.stdout.count("DAMAGE") == 1 and "slot 4: its payload is not" in result.stdout


def test_encrypted_blocks_without_their_key_are_said_to_be_unverified(
    encrypted: tuple[Path, Path],
) -> None:
    soil(encrypted[0] / "spill" / "blocks.kv", 4 * BLOCK_BYTES + 77)
    code, document = report(encrypted[0])
    assert code == 0
    [spill], [note] = document["spill"], document["notes"]
    assert (spill["payloads_locked"], spill["payloads_verified"]) == (9, 0)
    assert "9 encrypted blocks were not verified" in note
    encrypted[0].parent.joinpath("key").chmod(0o600)
    encrypted[0].parent.joinpath("key").write_bytes(bytes(32))
    assert "9 encrypted blocks were not verified" in check("--config", encrypted[1]).stdout
    encrypted[0].parent.joinpath("key").unlink()
    result = check("--config", encrypted[1])
    assert result.exit_code == 20 and "spill.encryption.key" in result.stderr


def test_a_damaged_data_key_is_found(encrypted: tuple[Path, Path]) -> None:
    headers = encrypted[0] / "spill" / "headers.kv"
    first = Geometry(4, MIB, MIB // 4096).clients_offset
    for copy in range(KEY_COPIES):
        soil(headers, first + copy * KEYS_MAX * RECORD_BYTES + 30)
    result = check("--config", encrypted[1])
    assert result.exit_code == 40
    assert "data key 0 is damaged" in result.stdout
    assert result.stdout.count("its payload is not what was stored") == 9


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("locked", ["state", "state/spill"])
def test_a_running_daemons_files_are_refused(state: Path, tmp_path: Path, locked: str) -> None:
    directory = lock_directory(str(tmp_path / locked))
    result = check("--state-dir", state)
    directory.close()
    assert result.exit_code == 20
    assert "another daemon has locked it" in result.stderr
    assert check("--state-dir", state).exit_code == 0


@pytest.mark.parametrize("make", [False, True])
def test_a_place_without_files_is_refused_and_left_empty(tmp_path: Path, make: bool) -> None:
    place = tmp_path / "none"
    if make:
        place.mkdir(mode=0o700)
    result = check("--state-dir", place)
    assert result.exit_code == 24
    assert "state_dir" in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == (["none"] if make else [])


def test_a_directory_that_is_no_daemons_is_not_asked_to_become_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    result = check("--state-dir", tmp_path)
    assert result.exit_code == 24
    assert "neither a catalog nor spill files" in result.stderr and "chmod" not in result.stderr


def test_the_groups_configuration_is_taken_too(tmp_path: Path, state: Path) -> None:
    config = tmp_path / "kvtierd.toml"
    config.write_text(f'state_dir = "{state}"\n')
    result = CliRunner().invoke(main, ["--config", str(config), "check"])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "ok")
    assert CliRunner().invoke(main, ["check"]).exit_code == 2


if os.geteuid() == 0:  # only root can become somebody else
    NOBODY = 65534

    def test_root_looks_at_files_as_their_owner_and_strangers_are_told_who_may() -> None:
        with tempfile.TemporaryDirectory(prefix="kvtierd-") as place:
            os.chmod(place, 0o711)
            state = stopped_daemon(Path(place), stored(SESSION, 0), [])
            os.seteuid(NOBODY)
            result = check("--state-dir", state)
            os.seteuid(0)
            assert result.exit_code == 20
            assert "be root or the daemon's user" in result.stderr
            for path in (state, *state.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
            result = check("--state-dir", state)
            assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "ok")
            os.chown(state / "spill", 0, 0)
            result = check("--state-dir", state)
            assert result.exit_code == 20 and "the daemon's user can read" in result.stderr

    def test_root_is_root_again_whatever_happens(tmp_path: Path) -> None:
        os.chown(tmp_path, NOBODY, NOBODY)

        def fail() -> None:
            with as_owner(str(tmp_path)):
                assert (os.geteuid(), os.getegid()) == (NOBODY, NOBODY)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert (os.geteuid(), os.getegid()) == (0, 0)
