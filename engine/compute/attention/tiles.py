"""Cuts one step's attention into tiles for a paged kernel.

A tile is a few query rows over a range of keys of one block table. A long range is cut at fixed
places. So a sequence's numbers do not depend on the other sequences of the batch. A row has one
part for each of its tiles. Its parts are merged by their log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
Ints = NDArray[np.int32]

SPLIT_TOKENS = 1024
"""The keys in one tile of decoding sequences. Fewer keys would make more parts to merge. More keys
would leave a GPU's processors idle while one computes a long sequence."""


@dataclass(frozen=True, slots=True)
class Run:
    """The new tokens of one sequence.

    The rows [begin, begin + count) are the positions [start, start + count) of the sequence.
    """

    begin: int
    count: int
    start: int
    table: Table


@dataclass(frozen=True, slots=True)
class Shared:
    """Decoding sequences, one row each, whose tables begin with the same blocks."""

    runs: Sequence[Run]
    # The number of blocks that are the same.
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's attention, cut into tiles.

    A tile has six numbers: the place in `rows` of its first row, the number of its rows, the place
    in `table` of its sequence's first block, the first key, the end of the keys, and its first
    part. Its other parts follow, one for each row.
    """

    # The rows of all tiles, tile after tile. A number is a place in the packed row.
    rows: Ints
    # The block tables of all sequences, one after another.
    table: Ints
    # (tiles, 6). The tiles of two rows or more.
    wide: Ints
    # (tiles, 6). The tiles of a single row.
    narrow: Ints
    # (rows + 1). Row r's parts are `parts[offsets[r] : offsets[r + 1]]`.
    offsets: Ints
    parts: Ints

    @property
    def num_parts(self) -> int:
        return len(self.parts)


def split_tokens(block_size: int) -> int:
    """The most keys that one tile of decoding sequences has. They are whole blocks."""
    return max(SPLIT_TOKENS // block_size, 1) * block_size


def cut(
    runs: Sequence[Run], shared: Sequence[Shared], num_rows: int, block_size: int, width: int
) -> Tiles:
    """The tiles of a step with `num_rows` rows. A wide tile has at most `width` rows."""
    split = split_tokens(block_size)
    tables = list[Table]()
    table_size = 0
    cut_rows = list[NDArray[np.int64]]()
    rows_size = 0
    wide = list[tuple[int, ...]]()
    narrow = list[tuple[int, ...]]()

    def place(table: Table) -> int:
        nonlocal table_size
        tables.append(table)
        table_size += len(table)
        return table_size - len(table)

    def add(rows: NDArray[np.int64], place: int, begin: int, end: int) -> None:
        nonlocal rows_size
        for first in range(0, len(rows), width):
            tile_rows = rows[first : first + width]
            tile = (rows_size, len(tile_rows), place, begin, end, rows_size)
            (narrow if len(tile_rows) == 1 else wide).append(tile)
            cut_rows.append(tile_rows)
            rows_size += len(tile_rows)

    def add_split(rows: NDArray[np.int64], place: int, begin: int, end: int) -> None:
        """Cut the keys at multiples of the split. Every row must see all of the keys."""
        while begin < end:
            next_end = min((begin // split + 1) * split, end)
            add(rows, place, begin, next_end)
            begin = next_end

    for run in runs:
        rows = np.arange(run.begin, run.begin + run.count)
        end = run.start + run.count
        (add_split if run.count == 1 else add)(rows, place(run.table), 0, end)
    for group in shared:
        begin = group.num_blocks * block_size
        places = [place(run.table) for run in group.runs]
        add_split(np.array([run.begin for run in group.runs]), places[0], 0, begin)
        for run, table_begin in zip(group.runs, places, strict=True):
            add_split(np.array([run.begin]), table_begin, begin, run.start + 1)
    rows = np.concatenate(cut_rows)
    counts = np.bincount(rows, minlength=num_rows)
    return Tiles(
        rows=rows.astype(np.int32),
        table=np.concatenate(tables).astype(np.int32),
        wide=np.array(wide, dtype=np.int32).reshape(-1, 6),
        narrow=np.array(narrow, dtype=np.int32).reshape(-1, 6),
        offsets=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        parts=np.argsort(rows, kind="stable").astype(np.int32),
    )
