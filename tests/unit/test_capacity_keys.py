"""Each capacity of the configuration binds by itself, whatever else is set or left out."""

from pathlib import Path

import pytest

from kvtierd import config as configuration
from kvtierd.start import _spill_settings, start
from tests.support.served import small_config
from tests.unit.test_start import end

MIB = 1 << 20


@pytest.mark.parametrize("capacity_bytes", [3 * MIB, 8 * MIB, 8 * MIB + 1])
@pytest.mark.parametrize("paths", [1, 3])
def test_each_capacity_binds_by_itself(tmp_path: Path, capacity_bytes: int, paths: int) -> None:
    wanted = [str(tmp_path / f"spill-{number}") for number in range(paths)]
    spill = {"capacity_bytes": capacity_bytes, "paths": wanted}
    parts = start(small_config(tmp_path, spill=spill))
    assert [Path(path, "blocks.kv").stat().st_size for path in wanted] == [
        capacity_bytes // MIB * MIB
    ] * paths
    (tenant,) = parts.state.world.tenants.values()
    assert tenant.arena_bytes() == 2 * MIB == len(parts.arenas["t"].payload)
    nvme = parts.state.world.nvme
    assert nvme.slabs * nvme.slab_bytes <= paths * capacity_bytes
    end(parts)


def test_a_quota_binds_although_the_files_are_larger(tmp_path: Path) -> None:
    tenants = [{"name": "t", "uids": ["self"], "arena_bytes": 2 * MIB, "spill_bytes": 2 * MIB + 1}]
    parts = start(small_config(tmp_path, tenants=tenants))
    (tenant,) = parts.state.world.tenants.values()
    assert tenant.nvme_quota.left * tenant.nvme.slab_bytes == 2 * MIB
    end(parts)


def test_a_capacity_that_is_left_out_is_the_documented_one() -> None:
    config = configuration.parse({})
    assert _spill_settings(config).geometry().payload_bytes == config.spill.capacity_bytes
