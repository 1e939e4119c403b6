"""The seam between sampled tokens and what a client reads."""

from collections.abc import Sequence
from typing import Protocol

from engine.cache.ids import TokenId
from engine.protocol import Delta, FinishReason


class Mask(Protocol):
    """What may come next, as far as it is known: `compute` finds it out, on any thread."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def is_failed(self) -> bool: ...

    def compute(self) -> None: ...


class OutputParser(Protocol):
    """Turns one choice's tokens into typed deltas; stateful, one per choice.

    `feed` returns what became certain with this token. When it sets `finish` the generation is
    over: the loop samples no more and the token that decided it is still counted. `close` returns
    what was held back (called once, after the last token, whatever ended the generation).
    `allowed` says which tokens may come next: a bit per token id, lowest first; None: all. Where
    something binds the output there is a `mask`; until it is ready, asking for `allowed` computes.
    """

    finish: FinishReason | None
    stop_sequence: str | None
    thinking_tokens: int

    @property
    def mask(self) -> Mask | None: ...

    @property
    def allowed(self) -> bytes | None: ...

    def feed(self, token_id: TokenId) -> Sequence[Delta]: ...

    def close(self) -> Sequence[Delta]: ...
