"""BlockTable and NodeTable: rows come and go, columns grow, nothing moves."""

import numpy as np
import pytest

from kvtierd.core.blocks import NONE, BlockTable, NodeTable, span


@pytest.mark.parametrize(
    ("places", "index"),
    [
        ([4, 5, 6], slice(4, 7)),
        ([4, 6, 5, 7], None),
        ([6, 5, 4], None),
        ([4], None),
        ([], None),
        ([NONE, 0, 1], None),
    ],
)
def test_neighbours_in_rising_order_become_a_slice(places: list[int], index: slice | None) -> None:
    found = span(np.array(places, np.int64))
    assert found == index if index is not None else np.array_equal(found, places)


def test_a_filled_row_has_every_column_as_given() -> None:
    one, many = BlockTable(8), BlockTable(8)
    name, use = tuple(range(1, 10)), tuple(range(10, 14))
    one.fill_one(3, 14, 15, name, use)
    common = (1, 2, 3, 0, 5, 6, 0, 0, 9)
    varying = {"seq": [4], "page": [7], "valid": [8]}
    columns = {column: np.array(values) for column, values in varying.items()}
    many.fill(np.array([3]), np.array([14]), 15, common, use, **columns)
    names = ("owner0", "owner1", "checksum", "seq", "pool", "node", "page", "valid", "touch",
             "flags", "priority", "readers", "pins", "dram", "nvme")  # fmt: skip
    for table in (one, many):
        assert [int(getattr(table, column)[3]) for column in names] == list(range(1, 16))
        assert table.use_of(3) == (3, 14, 8, 9, 12, 10)
    one.set_use(3, 77, 78)
    assert (one.touch[3], one.readers[3], one.pins[3], one.valid[3]) == (77, 78, 13, 8)


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
