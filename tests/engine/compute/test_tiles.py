"""Tiles of a step: each row meets each key before it once, by its own table."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.attention.tiles import Run, Shared, Tiles, cut

BLOCK_SIZE = 16


def table_for(tokens: int, first: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(first, first - (-tokens // BLOCK_SIZE), dtype=np.int64)


def keys_of_rows(tiles: Tiles) -> dict[int, Counter[tuple[int, int]]]:
    """By row, how often it meets each key: the block in memory and the slot."""
    met: dict[int, Counter[tuple[int, int]]] = {}
    for first, num, place, begin, end, _ in [*tiles.wide.tolist(), *tiles.narrow.tolist()]:
        for row in tiles.rows[first : first + num].tolist():
            keys = [
                (int(tiles.table[place + key // BLOCK_SIZE]), key % BLOCK_SIZE)
                for key in range(begin, end)
            ]
            met.setdefault(row, Counter()).update(keys)
    return met


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2300), st.integers(1, 40)), min_size=1, max_size=5),
    st.lists(st.integers(0, 50), max_size=4),
    st.sampled_from([1, 4, 16]),
)
def test_each_row_meets_each_key_of_its_table_once(
    steps: list[tuple[int, int]], shared_tails: list[int], width: int
) -> None:
    runs, row, blocks = [], 0, 0
    for start, count in steps:
        table = table_for(start + count, blocks)
        runs.append(Run(row, count, start, table))
        row, blocks = row + count, blocks + len(table)
    common = table_for(70 * BLOCK_SIZE, blocks)
    blocks += len(common)
    group = []
    for tail in shared_tails:
        start = 70 * BLOCK_SIZE + tail
        own = table_for(tail + 1, blocks)
        group.append(Run(row, 1, start, np.concatenate([common, own])))
        row, blocks = row + 1, blocks + len(own)
    shared = [Shared(group, 70)] if group else []
    tiles = cut(runs, shared, row, BLOCK_SIZE, width)
    met = keys_of_rows(tiles)
    for run in [*runs, *group]:
        end = run.start + run.count
        expected = Counter((int(run.table[k // BLOCK_SIZE]), k % BLOCK_SIZE) for k in range(end))
        for own_row in range(run.begin, run.begin + run.count):
            assert met[own_row] == expected
    check_parts(tiles, row)


def check_parts(tiles: Tiles, num_rows: int) -> None:
    """Each part belongs to the row whose tile wrote it."""
    assert sorted(tiles.parts.tolist()) == list(range(tiles.num_parts))
    for row in range(num_rows):
        parts = tiles.parts[tiles.offsets[row] : tiles.offsets[row + 1]]
        assert len(parts) and set(tiles.rows[parts].tolist()) == {row}
