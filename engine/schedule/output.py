"""The seam between sampled tokens and what a client reads."""

from collections.abc import Sequence
from typing import Protocol

from engine.cache.ids import TokenId
from engine.protocol import Delta, FinishReason


class Mask(Protocol):
    """The allowed next tokens. `compute` finds them, on any thread.

    `ahead` are the tokens allowed behind the first, the second and so on of those that `foresee`
    named, as far as they are allowed and `compute` has got.
    """

    @property
    def is_ready(self) -> bool: ...
    @property
    def is_failed(self) -> bool: ...
    @property
    def ahead(self) -> Sequence[bytes]: ...

    def foresee(self, draft: Sequence[TokenId]) -> None: ...
    def compute(self) -> None: ...


class OutputParser(Protocol):
    """Turns one choice's tokens into typed deltas. It has state; there is one per choice.

    `feed` returns the deltas that became certain with this token. When it sets `finish` the
    generation is over: the loop samples no more, and the deciding token is still counted. `close`
    returns the text that was held back. It is called once, after the last token, however the
    generation ended.

    `allowed` are the tokens that may come next: a bit per token id, lowest first; None: all. If a
    grammar binds the output there is a `mask`. Until the mask is ready, reading `allowed` computes
    it.
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
