"""Recorded turns as a trace in Mooncake's format (FAST '25), which other tools replay.

A line is one turn: `timestamp` (ms since the first), `input_length` and `output_length` (tokens),
and `hash_ids`, a number for each block of the prompt. Equal numbers mean that the blocks are equal
and all blocks before them too. Each trace counts up from 0 in the order in which blocks are first
seen. So the numbers tell nothing of the content, and two traces can't be compared by them.

The ledger knows how far prompts are equal only at certain places: at the ends of content blocks,
and every 4,096 characters inside long texts. Two prompts that differ first between two such places
count as different from the first of the two on. Pure.
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
"""The most known prefixes of all turns together."""
MAX_IDS = 10_000_000
_PIECE_BYTES = 64 * 1024
_encode = msgspec.json.Encoder().encode


class RecordedTurn(NamedTuple):
    """One turn of the ledger, without its content."""

    # Milliseconds since 1970.
    at_ms: int
    # The number of the workspace and model.
    scope: int
    # The numbers of the prompt's known prefixes, the shortest first.
    points: list[int]
    # The tokens of each known prefix.
    ends: list[int]
    # The tokens of the prompt.
    tokens: int
    # The tokens of the answer.
    output: int


class TraceLine(msgspec.Struct, frozen=True):
    """One line of a trace, in Mooncake's format."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceGathering:
    """Takes rows of the ledger, the newest first, up to the bounds of a trace."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._scopes = Numbers()
        self._turns: list[RecordedTurn] = []
        self._num_points = 0
        # The number of turns with estimated lengths of prefixes, because no engine told them.
        self.num_estimated = 0

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def is_too_much(self) -> bool:
        """Whether there are more turns or known prefixes than a trace may have."""
        return len(self._turns) > MAX_TURNS or self._num_points > MAX_POINTS

    def take(self, rows: Sequence[Any]) -> None:
        for row in rows:
            if not self.is_too_much:
                self._take(row)

    def _take(self, row: Any) -> None:
        fingerprint = unpack(row.fingerprint)
        if fingerprint.rule != NAMES_RULE or not fingerprint.points:
            return
        tokens = fingerprint.num_tokens
        if not tokens:
            return
        token_counts = fingerprint.tokens or [0] * len(fingerprint.points)
        whole = max(fingerprint.num_bytes, 1)
        ends: list[int] = []
        last = 0
        for exact, point in zip(token_counts, fingerprint.points, strict=True):
            last = min(max(last, exact or point.num_bytes * tokens // whole), tokens)
            ends.append(last)
        self.num_estimated += not all(token_counts)
        self._num_points += len(ends)
        self._turns.append(
            RecordedTurn(
                at_ms=row.opened_ms,
                scope=self._scopes.of((row.workspace_id, row.model)),
                points=[self._numbers.of(point.digest) for point in fingerprint.points],
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
        """The turns as lines of JSON, the oldest first. All pieces but the last have 64 KiB or
        more."""
        piece = bytearray()
        for line in trace_of(self._turns[::-1], block_tokens):
            piece += _encode(line) + b"\n"
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        if piece:
            yield bytes(piece)


def trace_of(turns: Sequence[RecordedTurn], block_tokens: int) -> Iterator[TraceLine]:
    """The lines of a trace with blocks of `block_tokens`. The turns must be in order of time.

    A prompt's last block may be partly filled. Two prompts share such a block only if both end at
    the same known prefix.
    """
    # By scope and known prefix: the block ids of a prompt that begins with the prefix, and the
    # number of whole blocks in the prefix.
    beginnings: dict[tuple[int, int], tuple[list[int], int]] = {}
    # By scope and known prefix: the partly filled last block of prompts that end there.
    partial: dict[tuple[int, int], int] = {}
    num_ids = 0
    for turn in turns:
        ids: list[int] = []
        for point, end in zip(reversed(turn.points), reversed(turn.ends), strict=True):
            beginning = beginnings.get((turn.scope, point))
            if beginning is not None:
                ids = beginning[0][: min(beginning[1], end // block_tokens)]
                break
        count = ceil_div(turn.tokens, block_tokens)
        num_full = turn.tokens // block_tokens
        fresh = max(num_full - len(ids), 0)
        ids += range(num_ids, num_ids + fresh)
        num_ids += fresh
        for point, end in zip(turn.points, turn.ends, strict=True):
            beginnings.setdefault((turn.scope, point), (ids, end // block_tokens))
        whole = ids
        if count > num_full:
            last = num_ids
            if turn.ends[-1] == turn.tokens:
                last = partial.setdefault((turn.scope, turn.points[-1]), num_ids)
            num_ids += last == num_ids
            whole = [*ids, last]
        yield TraceLine(turn.at_ms - turns[0].at_ms, turn.tokens, turn.output, whole)
