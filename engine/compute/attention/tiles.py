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
    """Decoding sequences, one row each, whose tables begin with the same `num_blocks`."""

    runs: Sequence[Run]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """`wide` tiles have up to as many rows as asked for, `narrow` ones a single one.

    A tile (tiles, 6) is: the place in `rows` of its first token row, the number of its rows, the
    place in `table` of its sequence's block 0, its keys' begin and end, and its first part. Row r's
    parts are `parts[offsets[r] : offsets[r + 1]]`.
    """

    rows: Ints
    table: Ints
    wide: Ints
    narrow: Ints
    offsets: Ints
    parts: Ints

    @property
    def num_parts(self) -> int:
        return len(self.parts)


def cut(
    runs: Sequence[Run], shared: Sequence[Shared], num_rows: int, block_size: int, width: int
) -> Tiles:
    """The tiles of a step of `num_rows` rows; `width` is the most rows of a wide tile."""
    cutter = _Cutter(num_rows, max(SPLIT_TOKENS // block_size, 1) * block_size, width)
    for run in runs:
        rows, end = np.arange(run.begin, run.begin + run.count), run.start + run.count
        place = cutter.place(run.table)
        if run.count == 1:
            cutter.add_split(rows, place, 0, end)
        else:
            cutter.add(rows, place, 0, end)
    for group in shared:
        begin = group.num_blocks * block_size
        places = [cutter.place(run.table) for run in group.runs]
        cutter.add_split(np.array([run.begin for run in group.runs]), places[0], 0, begin)
        for run, place in zip(group.runs, places, strict=True):
            cutter.add_split(np.array([run.begin]), place, begin, run.start + 1)
    return cutter.tiles()


class _Cutter:
    def __init__(self, num_rows: int, split: int, width: int) -> None:
        self._num_rows = num_rows
        self._split = split
        self._width = width
        self._tables: list[Table] = []
        self._table_size = 0
        self._rows: list[NDArray[np.int64]] = []
        self._rows_size = 0
        self._wide: list[tuple[int, ...]] = []
        self._narrow: list[tuple[int, ...]] = []

    def place(self, table: Table) -> int:
        place = self._table_size
        self._tables.append(table)
        self._table_size += len(table)
        return place

    def add_split(self, rows: NDArray[np.int64], place: int, begin: int, end: int) -> None:
        """Cut the keys at multiples of the split; all of them are at or before every row."""
        while begin < end:
            next_end = min((begin // self._split + 1) * self._split, end)
            self.add(rows, place, begin, next_end)
            begin = next_end

    def add(self, rows: NDArray[np.int64], place: int, begin: int, end: int) -> None:
        for first in range(0, len(rows), self._width):
            some = rows[first : first + self._width]
            tile = (self._rows_size, len(some), place, begin, end, self._rows_size)
            (self._narrow if len(some) == 1 else self._wide).append(tile)
            self._rows.append(some)
            self._rows_size += len(some)

    def tiles(self) -> Tiles:
        rows = np.concatenate(self._rows)
        counts = np.bincount(rows, minlength=self._num_rows)
        return Tiles(
            rows=rows.astype(np.int32),
            table=np.concatenate(self._tables).astype(np.int32),
            wide=np.array(self._wide, dtype=np.int32).reshape(-1, 6),
            narrow=np.array(self._narrow, dtype=np.int32).reshape(-1, 6),
            offsets=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
            parts=np.argsort(rows, kind="stable").astype(np.int32),
        )
