"""How one step's attention is cut into tiles for the paged kernel.

A tile is a few query rows over a range of keys of one block table. A long range is cut at fixed
places, so that a sequence's numbers do not depend on what else is in the batch. A row's parts, one
for each of its tiles, are merged by their log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
Ints = NDArray[np.int32]

# Tokens of keys in one tile of decoding sequences. Fewer would make more parts to merge, more
# would leave a GPU's processors idle behind one long sequence.
SPLIT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [begin, begin + count) are positions [start, start + count) of one sequence."""

    begin: int
    count: int
    start: int
    table: Table


@dataclass(frozen=True, slots=True)
class Shared:
    """Decoding sequences, one row each, whose tables begin with the same blocks."""

    runs: Sequence[Run]
    # How many blocks are the same.
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's work, cut in tiles (tiles, 6). A tile's six numbers are: the place in `rows` of its
    first token row, the number of its rows, the place in `table` of its sequence's block 0, its
    keys' begin and end, and its first part.
    """

    rows: Ints
    table: Ints
    # Tiles of up to as many rows as asked for.
    wide: Ints
    # Tiles of a single row.
    narrow: Ints
    # Row r's parts are `parts[offsets[r] : offsets[r + 1]]`.
    offsets: Ints
    parts: Ints

    @property
    def num_parts(self) -> int:
        return len(self.parts)


def split_tokens(block_size: int) -> int:
    """How many keys one tile of decoding sequences has at most: whole blocks of them."""
    return max(SPLIT_TOKENS // block_size, 1) * block_size


def cut(
    runs: Sequence[Run], shared: Sequence[Shared], num_rows: int, block_size: int, width: int
) -> Tiles:
    """The tiles of a step of `num_rows` rows; `width` is the most rows of a wide tile."""
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
            some = rows[first : first + width]
            tile = (rows_size, len(some), place, begin, end, rows_size)
            (narrow if len(some) == 1 else wide).append(tile)
            cut_rows.append(some)
            rows_size += len(some)

    def add_split(rows: NDArray[np.int64], place: int, begin: int, end: int) -> None:
        """Cut the keys at multiples of the split; all of them are at or before every row."""
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
