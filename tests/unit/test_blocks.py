"""BlockTable and NodeTable: rows come and go, columns grow, nothing moves."""

import numpy as np
import pytest

from kvtierd.core.blocks import BlockTable, NodeTable


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
