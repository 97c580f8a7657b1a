"""BlockTable and NodeTable: rows come and go, columns grow, nothing moves."""

import numpy as np
import pytest

from kvtierd.core.blocks import BlockTable, NodeTable, span


@pytest.mark.parametrize(
    ("places", "index"),
    [([4, 5, 6], slice(4, 7)), ([4, 6, 5, 7], None), ([6, 5, 4], None), ([4], None), ([], None)],
)
def test_neighbours_in_rising_order_become_a_slice(places: list[int], index: slice | None) -> None:
    found = span(np.array(places, np.int64))
    assert found == index if index is not None else np.array_equal(found, places)


def test_a_filled_row_has_every_column_as_given() -> None:
    one, many = BlockTable(8), BlockTable(8)
    values = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    one.fill_one(3, *values)
    common = (1, 2, 3, 0, 0, 6, 7, 8, 0, 0, 11, 12, 13, 14, 15)
    varying = {"seq": [4], "dram": [5], "page": [9], "valid": [10]}
    many.fill(np.array([3]), common, **{name: np.array(v) for name, v in varying.items()})
    names = ("owner0", "owner1", "checksum", "seq", "dram", "nvme", "pool", "node", "page",
             "valid", "touch", "readers", "pins", "flags", "priority")  # fmt: skip
    assert tuple(int(getattr(one, name)[3]) for name in names) == values
    assert tuple(int(getattr(many, name)[3]) for name in names) == values


def test_rows_are_handed_out_once() -> None:
    table = BlockTable(capacity=4)
    rows = np.concatenate([table.add(3), [table.add_one()], table.add(5)])
    assert sorted(rows.tolist()) == list(range(9))
    assert table.used == 9


def test_growth_keeps_every_column() -> None:
    table = BlockTable(capacity=2)
    first = table.add(2)
    table.owner0[first], table.valid[first] = [7, 8], [1, 2]
    table.add(100)
    assert table.owner0[first].tolist() == [7, 8]
    assert table.valid[first].tolist() == [1, 2]


def test_removed_rows_are_used_again_before_the_table_grows() -> None:
    table = BlockTable(capacity=8)
    rows = table.add(8)
    table.remove(rows[2:5])
    assert sorted(table.add(3).tolist()) == [2, 3, 4]
    assert table.capacity == 8


def test_mask_of_used_rows_follows_add_and_remove() -> None:
    table = BlockTable(capacity=8)
    rows = table.add(5)
    table.remove(rows[:2])
    assert np.flatnonzero(table.used_mask()).tolist() == [2, 3, 4]


def test_giving_back_more_than_there_is_fails() -> None:
    table = BlockTable(capacity=4)
    with pytest.raises(AssertionError, match="twice"):
        table.remove(np.array([0], np.int64))


def test_node_indexes_are_used_again_and_the_table_grows() -> None:
    nodes = NodeTable()
    indexes = [nodes.add(i, 0, i) for i in range(200)]
    assert len(set(indexes)) == 200
    assert nodes.node[indexes[150]] == 150
    nodes.remove(indexes[3])
    assert nodes.add(999, 5, 6) == indexes[3]
    assert (nodes.node[indexes[3]], nodes.parent[indexes[3]]) == (999, 5)
