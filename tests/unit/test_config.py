"""A configuration is taken as written and as documented, or refused by the wrong key's name."""

import os
import re
from pathlib import Path

import msgspec
import pytest

from kvtierd import config
from kvtierd.config import Config, ConfigError
from kvtierd.quantities import GIB, MIB, Seconds, Size, Uid

ROOT = Path(__file__).parents[2]
DOCUMENTED = ROOT / "configs" / "kvtierd.toml"


def keys_of(section: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(section)]


def test_the_documented_file_holds_exactly_the_defaults() -> None:
    assert config.load(DOCUMENTED) == config.parse({})


def test_the_documented_file_mentions_every_key_of_every_table() -> None:
    tables = re.split(r"^\[+([\w.]+)\]+$", DOCUMENTED.read_text(), flags=re.MULTILINE)
    written = {
        table: set(re.findall(r"^(\w+) = ", text, flags=re.MULTILINE))
        for table, text in zip(["", *tables[1::2]], tables[0::2], strict=True)
    }
    sections = {
        "socket": config.SocketConfig,
        "arena": config.ArenaConfig,
        "spill": config.SpillConfig,
        "spill.encryption": config.EncryptionConfig,
        "scrub": config.ScrubConfig,
        "recovery": config.RecoveryConfig,
        "limits": config.LimitsConfig,
        "stop": config.StopConfig,
        "tenants": config.TenantConfig,
    }
    expected = {table: set(keys_of(section)) for table, section in sections.items()}
    expected["spill"].remove("encryption")  # a table of its own
    assert written == expected | {"": set(keys_of(Config)) - set(sections)}


def test_paths_follow_the_two_directories() -> None:
    made = config.parse({"runtime_dir": "/a", "state_dir": "/b"})
    assert made.socket == config.SocketConfig("/a/kvtierd.sock", "/a/admin.sock")
    assert made.spill.paths == ("/b/spill",)


def test_given_paths_stay() -> None:
    made = config.parse({"spill": {"paths": ["/x", "{state_dir}/y"]}, "state_dir": "/b"})
    assert made.spill.paths == ("/x", "/b/y")


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (4096, 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("1.5 MiB", 3 * MIB // 2),
        ("2TiB", 2048 * GIB),
    ],
)
def test_sizes_are_bytes(written: object, size_bytes: int) -> None:
    assert Size.parse(written) == size_bytes


@pytest.mark.parametrize(
    "written", [-1, 1.5, True, "64", "64MB", "64 mib", "MiB", "-1MiB", "0.3B", "", None, 2**63]
)
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(ConfigError, match=r"^limits\.blob_bytes = .*: must be a size such as"):
        config.parse({"limits": {"blob_bytes": written}})


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (30, 30),
        (0.5, 0.5),
        ("30s", 30),
        ("10m", 600),
        ("24h", 86400),
        ("250ms", 0.25),
        ("2d", 172800),
    ],
)
def test_durations_are_seconds(written: object, seconds: float) -> None:
    assert Seconds.parse(written) == seconds


@pytest.mark.parametrize("written", [-1, True, "30", "30 sec", float("nan"), float("inf"), "", []])
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(ConfigError, match=r"^stop\.timeout = .*: must be a duration such as"):
        config.parse({"stop": {"timeout": written}})


def test_orphans_may_be_kept_for_ever() -> None:
    assert config.parse({"recovery": {"orphan_ttl": "never"}}).recovery.orphan_ttl_s == float("inf")


def test_a_scrub_may_be_left_to_operators() -> None:
    assert config.parse({"scrub": {"interval": "never"}}).scrub.interval_s == float("inf")


@pytest.mark.parametrize("key", ["/etc/kvtierd/key", "credential:master-key"])
def test_a_key_is_a_file_or_a_credential_and_looked_at_only_by_a_start(key: str) -> None:
    made = config.parse({"spill": {"encryption": {"enabled": True, "key": key}}})
    assert made.spill.encryption == config.EncryptionConfig(True, key)


def test_no_other_wait_may_be_endless() -> None:
    with pytest.raises(ConfigError, match=r"^limits\.wait_max = .never.: must"):
        config.parse({"limits": {"wait_max": "never"}})


def test_self_is_the_uid_of_this_process() -> None:
    made = config.parse({"tenants": [{"name": "a", "uids": ["self", 70000]}]})
    assert made.tenants[0].uids == (os.geteuid(), 70000)
    assert config.parse({}).tenants[0].uids == (Uid(os.geteuid()),)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"sockets": {}}, "sockets: unknown key; did you mean socket?"),
        ({"arena": {"slab_byts": 1}}, "arena.slab_byts: unknown key; did you mean slab_bytes?"),
        ({"tenants": [{"name": "a", "uid": [1]}]}, "tenants[0].uid: unknown key"),
        ({"tenants": [{}]}, "tenants[0].name: is missing"),
        ({"arena": 3}, "arena = 3: must be a table"),
        ({"tenants": {"name": "a"}}, "tenants = {…}: must be a list, each item a table"),
        (
            {"arena": {"mlock": "yes"}},
            'arena.mlock = "yes": must be one of "try", "require", "off"',
        ),
        ({"arena": {"prefault": 1}}, "arena.prefault = 1: must be true or false"),
        ({"limits": {"groups": "9"}}, 'limits.groups = "9": must be a whole number'),
        ({"limits": {"groups": True}}, "limits.groups = true: must be a whole number"),
        ({"state_dir": 1}, "state_dir = 1: must be text in quotes"),
        ({"spill": {"paths": "/a"}}, 'spill.paths = "/a": must be a list, each item text'),
        ({"tenants": [{"name": "a", "uids": ["root"]}]}, 'tenants[0].uids[0] = "root": must be a'),
    ],
)
def test_unknown_and_wrong_keys_are_refused_by_name(
    document: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config.parse(document)
    assert str(refused.value).startswith(message)


NAN = float("nan")
TWO_OWNERS = [{"name": "a", "uids": [7]}, {"name": "b", "uids": [8, 7]}]
TWO_NAMES = [{"name": "a", "uids": [7]}, {"name": "a", "uids": [8]}]


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"state_dir": "here"}, "state_dir"),
        ({"runtime_dir": "/" + "r" * 100}, "socket.client_path"),
        ({"socket": {"admin_path": "{runtime_dir}/kvtierd.sock"}}, "socket.admin_path"),
        ({"arena": {"high_watermark": 1.1}}, "arena.high_watermark"),
        ({"arena": {"high_watermark": NAN}}, "arena.high_watermark"),
        ({"arena": {"low_watermark": 0.9}}, "arena.low_watermark"),
        ({"arena": {"exchange_headroom": -0.1}}, "arena.exchange_headroom"),
        ({"arena": {"prefault_threads": 0}}, "arena.prefault_threads"),
        ({"arena": {"min_block_bytes": 5000}}, "arena.min_block_bytes"),
        ({"arena": {"slab_bytes": "63MiB"}}, "arena.slab_bytes"),
        ({"arena": {"slab_bytes": "512MiB", "min_block_bytes": "4KiB"}}, "arena.slab_bytes"),
        ({"arena": {"min_block_bytes": "128MiB"}}, "arena.slab_bytes"),
        ({"spill": {"paths": []}}, "spill.paths"),
        ({"spill": {"paths": ["/a", "/a/"]}}, "spill.paths"),
        ({"spill": {"paths": ["/a", "b"]}}, "spill.paths[1]"),
        ({"spill": {"slab_bytes": 5000}}, "spill.slab_bytes"),
        ({"spill": {"encryption": {"enabled": True}}}, "spill.encryption.key"),
        ({"spill": {"encryption": {"old_key": "/k"}}}, "spill.encryption.key"),
        ({"spill": {"encryption": {"key": "k"}}}, "spill.encryption.key"),
        (
            {"spill": {"encryption": {"key": "/k", "old_key": "credential:a/b"}}},
            "spill.encryption.old_key",
        ),
        ({"scrub": {"rate": 0}}, "scrub.rate"),
        ({"scrub": {"interval": 0}}, "scrub.interval"),
        ({"spill": {"capacity_bytes": "1MiB"}}, "spill.capacity_bytes"),
        ({"limits": {"lease_ttl": "11m"}}, "limits.lease_ttl"),
        ({"limits": {"frame_bytes": "4GiB"}}, "limits.frame_bytes"),
        ({"limits": {"blob_bytes": "2MiB"}}, "limits.blob_bytes"),
        ({"limits": {"output_buffer_bytes": "1MiB"}}, "limits.output_buffer_bytes"),
        ({"limits": {"quarantine_fraction": 0}}, "limits.quarantine_fraction"),
        ({"limits": {"groups": 10**30}}, "limits.groups"),
        ({"stop": {"timeout": 0}}, "stop.timeout"),
        ({"tenants": []}, "tenants"),
        ({"tenants": [{"name": "a/b"}]}, "tenants[0].name"),
        ({"tenants": [{"name": "a", "uids": []}]}, "tenants[0].uids"),
        ({"tenants": [{"name": "a", "arena_bytes": "65MiB"}]}, "tenants[0].arena_bytes"),
        ({"tenants": TWO_OWNERS}, "tenants[1].uids"),
        ({"tenants": TWO_NAMES}, "tenants[1].name"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(document: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.parse(document)
    assert str(refused.value).startswith(f"{key} = ")
    assert ": must be " in str(refused.value)


def test_small_pages_let_slabs_be_small() -> None:
    arena = {"huge_pages": "off", "slab_bytes": "64KiB"}
    assert config.parse({"arena": arena}).arena.slab_bytes == 65536


def test_no_invalid_configuration_can_be_made_in_code() -> None:
    with pytest.raises(ConfigError, match=r"^state_dir"):
        msgspec.structs.replace(config.parse({}), state_dir="here")


def test_ephemeral_keeps_everything_below_its_directory(tmp_path: Path) -> None:
    made = config.ephemeral(tmp_path)
    places = (made.runtime_dir, made.state_dir, *made.spill.paths)
    for place in (*places, made.socket.client_path, made.socket.admin_path):
        assert place.startswith(f"{tmp_path}/")
    assert made.tenants[0].arena_bytes == 256 * MIB
    assert made.spill.capacity_bytes == GIB
    assert made.recovery.orphan_ttl_s == 3600


def test_a_file_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cannot read configuration .*missing\.toml: No such"):
        config.load(tmp_path / "missing.toml")


@pytest.mark.parametrize("content", [b"arena = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused_by_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^configuration .*broken\.toml is not TOML: "):
        config.load(path)
