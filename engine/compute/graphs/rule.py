"""Which decode steps are launched as a CUDA graph, and the sizes that graphs are captured in.

A graph does the same work with other numbers in the same memory. So it has a fixed number of rows.
It does no work that needs the host. `why_plain` is the whole rule of which steps are launched.
All other steps go the plain way.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.compute.sampler import HEAD, is_greedy
from engine.schedule.runner import Work
from engine.sizing import blocks_for

MOST_ROWS = 256
"""The most rows of a graph. A larger batch takes longer to compute than to launch."""
MOST_PARTS = 4096
"""The most parts of attention in one step. A part is a row over at most `SPLIT_TOKENS` keys."""
_LEAST_PARTS = 64
"""The least room for parts that a graph has."""
_PARTS_STEP = 4
"""The factor from the parts of one size to the parts of the next. A part that a step does not need
costs a launched program that ends at once."""

PLAIN: Mapping[str, Callable[[Work], bool]] = {
    "several tokens of a sequence, as in prefill": lambda work: len(work.token_ids) != 1,
    "nothing is drawn behind a token": lambda work: work.sample is None,
    "a token mask": lambda work: work.allowed is not None,
    "a bias, or a presence or frequency penalty": lambda work: work.bias is not None,
    "a repetition penalty": lambda work: work.seen is not None,
    "log-probabilities": lambda work: work.probs is not None,
    "an adapter": lambda work: work.adapter is not None,
    "a recurrent state": lambda work: work.state is not None,
    f"a top-k of more than {HEAD}": lambda work: (
        work.sample is not None and not is_greedy(work.sample) and work.sample.top_k > HEAD
    ),
}
"""The reasons why a step goes the plain way. One work for which the function is true is enough."""
TOO_MANY_ROWS = "more sequences than the largest graph has"
TOO_MANY_PARTS = f"attention in more than {MOST_PARTS:,} parts"


def why_plain(works: Sequence[Work], sizes: "GraphSizes") -> str | None:
    """Why a step goes the plain way, in the words of this module; None: a graph is launched."""
    for reason, is_so in PLAIN.items():
        if any(map(is_so, works)):
            return reason
    if len(works) > sizes.rows[-1]:
        return TOO_MANY_ROWS
    # A row behind a shared prefix may have one part more.
    most = sum(blocks_for(work.start + 1, sizes.split) + 1 for work in works)
    return TOO_MANY_PARTS if most > sizes.most_parts(len(works)) else None


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The room of one graph."""

    # The number of rows. Each sequence that decodes has one.
    rows: int
    # The number of parts of attention.
    parts: int
    # Whether tokens may be drawn. Otherwise all rows take the likeliest token.
    draws: bool

    @property
    def wide_tiles(self) -> int:
        """The number of wide tiles. A wide tile has two rows or more, and a part for each row."""
        return self.parts // 2 if self.rows > 1 else 0

    @property
    def tiles(self) -> int:
        """The number of tiles: the wide ones, and a narrow one for each part."""
        return self.wide_tiles + self.parts


class GraphSizes:
    """The sizes of one engine's graphs. They have 1, 2, 4, … rows, and `most_rows`."""

    def __init__(self, most_rows: int, most_tokens: int, split: int) -> None:
        """At most `most_rows` sequences decode together, each of at most `most_tokens` tokens.

        A part has at most `split` keys.
        """
        self.split = split
        most_rows = min(most_rows, MOST_ROWS)
        powers = [2**power for power in range(most_rows.bit_length())]
        self.rows: list[int] = sorted({*powers, most_rows})
        self._parts = {rows: _part_sizes(rows, most_tokens, split) for rows in self.rows}

    def most_parts(self, rows: int) -> int:
        """The most parts of a step with so many rows."""
        return self._parts[self._fitting_rows(rows)][-1]

    def all(self) -> list[GraphSize]:
        """All sizes, the largest first. The graphs of smaller sizes then reuse its memory."""
        sizes = [
            GraphSize(rows, parts, draws)
            for rows in self.rows
            for parts in self._parts[rows]
            for draws in (False, True)
        ]
        return sizes[::-1]

    def fitting(self, rows: int, parts: int, *, draws: bool) -> GraphSize:
        """The smallest size that has room for a step that `why_plain` lets through."""
        fitting_rows = self._fitting_rows(rows)
        part_sizes = self._parts[fitting_rows]
        return GraphSize(fitting_rows, part_sizes[bisect_left(part_sizes, parts)], draws)

    def _fitting_rows(self, rows: int) -> int:
        return next(size for size in self.rows if size >= rows)


def _part_sizes(rows: int, most_tokens: int, split: int) -> list[int]:
    most = min(rows * (blocks_for(most_tokens, split) + 1), MOST_PARTS)
    sizes = [min(max(_PARTS_STEP * rows, _LEAST_PARTS), most)]
    while sizes[-1] < most:
        sizes.append(min(_PARTS_STEP * sizes[-1], most))
    return sizes
