"""Recorded turns as a trace in Mooncake's format (FAST '25), which other tools replay.

A line is one turn: `timestamp` (ms since the first), `input_length` and `output_length` (tokens),
and `hash_ids`, a number for each block of the prompt. Equal numbers are equal blocks with all that
stands before them. They count up in the order in which blocks are first seen, anew in each trace,
so they tell nothing of a content, and no two traces can be laid beside each other by them.

The ledger knows where prompts are equal at the ends of content blocks, and inside long texts every
4,096 characters. Where two prompts part between two such places, they are taken to part at the one
before. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.base.errors import InvalidRequest
from gateway.base.rounding import ceil_div
from gateway.planning.traffic import MAX_TURNS, Numbers
from gateway.prompt.fingerprint import unpack
from gateway.prompt.names import NAMES_RULE

MAX_POINTS = 4_000_000
"""The most known places of all turns together."""
MAX_IDS = 10_000_000
_PIECE_BYTES = 64 * 1024
_encode = msgspec.json.Encoder().encode


class RecordedTurn(NamedTuple):
    """`points` are numbers of the prompt's known prefixes, the shortest first, and `ends` how many
    tokens each has. `scope` is a workspace's model. `at_ms` is since 1970."""

    at_ms: int
    scope: int
    points: list[int]
    ends: list[int]
    tokens: int
    output: int


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceGathering:
    """Takes rows of the ledger, the newest first. `is_too_much`: more of them than a trace may
    have. `num_estimated` turns have places whose tokens their engines did not tell."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._scopes = Numbers()
        self._turns: list[RecordedTurn] = []
        self._num_points = 0
        self.num_estimated = 0

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def is_too_much(self) -> bool:
        return len(self._turns) > MAX_TURNS or self._num_points > MAX_POINTS

    def take(self, rows: Sequence[Any]) -> None:
        for row in rows:
            if not self.is_too_much:
                self._take(row)

    def _take(self, row: Any) -> None:
        printed = unpack(row.fingerprint)
        if printed.rule != NAMES_RULE or not printed.points:
            return
        tokens = printed.num_tokens
        if not tokens:
            return
        counted = printed.tokens or [0] * len(printed.points)
        whole = max(printed.num_bytes, 1)
        ends: list[int] = []
        last = 0
        for exact, point in zip(counted, printed.points, strict=True):
            last = min(max(last, exact or point.num_bytes * tokens // whole), tokens)
            ends.append(last)
        self.num_estimated += not all(counted)
        self._num_points += len(ends)
        self._turns.append(
            RecordedTurn(
                at_ms=row.opened_ms,
                scope=self._scopes.of((row.workspace_id, row.model)),
                points=[self._numbers.of(point.digest) for point in printed.points],
                ends=ends,
                tokens=tokens,
                output=row.output_tokens,
            )
        )

    def check_blocks(self, block_tokens: int) -> None:
        """Raise InvalidRequest for a trace with too many ids of blocks."""
        num_ids = sum(ceil_div(turn.tokens, block_tokens) for turn in self._turns)
        if num_ids > MAX_IDS:
            raise InvalidRequest(
                f"block_tokens: a trace has at most {MAX_IDS:,} ids of blocks, and this one has"
                f" {num_ids:,}: ask for larger blocks or a shorter range"
            )

    def pieces(self, block_tokens: int) -> Iterator[bytes]:
        """The turns as lines of JSON, in the order in which they came; some of them at a time."""
        piece = bytearray()
        for line in trace_of(self._turns[::-1], block_tokens):
            piece += _encode(line) + b"\n"
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        if piece:
            yield bytes(piece)


def trace_of(turns: Sequence[RecordedTurn], block_tokens: int) -> Iterator[TraceLine]:
    """The turns, which are in the order of time, in blocks of so many tokens. A prompt's last block
    may be filled in part: then another prompt has it only if both end there."""
    # By scope and known prefix: a prompt that begins with it, as the ids of its blocks.
    begun: dict[tuple[int, int], tuple[list[int], int]] = {}
    # The last block of prompts that end at a known prefix, where it is not full.
    partial: dict[tuple[int, int], int] = {}
    num_ids = 0
    for turn in turns:
        ids: list[int] = []
        for point, end in zip(reversed(turn.points), reversed(turn.ends), strict=True):
            beginning = begun.get((turn.scope, point))
            if beginning is not None:
                ids = beginning[0][: min(beginning[1], end // block_tokens)]
                break
        count = ceil_div(turn.tokens, block_tokens)
        num_full = turn.tokens // block_tokens
        fresh = max(num_full - len(ids), 0)
        ids += range(num_ids, num_ids + fresh)
        num_ids += fresh
        for point, end in zip(turn.points, turn.ends, strict=True):
            begun.setdefault((turn.scope, point), (ids, end // block_tokens))
        whole = ids
        if count > num_full:
            last = num_ids
            if turn.ends[-1] == turn.tokens:
                last = partial.setdefault((turn.scope, turn.points[-1]), num_ids)
            num_ids += last == num_ids
            whole = [*ids, last]
        yield TraceLine(turn.at_ms - turns[0].at_ms, turn.tokens, turn.output, whole)
