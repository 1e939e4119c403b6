"""The interface between sampled tokens and what a client reads."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from engine.cache.ids import TokenId
from engine.protocol import Delta, DrawnToken, FinishReason, TextDelta, TokenProb
from engine.schedule.runner import DrawnProbs


class OutputConstraint(Protocol):
    """What the output must keep to, such as a grammar.

    Its token mask says which tokens may come next. `compute` finds it, on any thread.
    """

    @property
    def is_ready(self) -> bool: ...
    @property
    def is_failed(self) -> bool: ...
    def compute(self) -> None: ...


class OutputParser(Protocol):
    """Turns one choice's tokens into typed deltas. It has state; there is one per choice.

    `feed` returns the deltas that became certain with this token. `close` returns the text that was
    not yet certain. It is called once, after the last token, however the generation ended.
    """

    # Set by `feed` once the generation is over. The token that ended it is still counted.
    finish: FinishReason | None
    # Tokens that end the generation where they are drawn.
    end_token_ids: frozenset[TokenId]
    stop_sequence: str | None
    thinking_tokens: int

    @property
    def constraint(self) -> OutputConstraint | None:
        """None where the output is free."""
        ...

    @property
    def allowed(self) -> bytes | None:
        """The token mask: a bit per token id, lowest first, 1 where it may come next. None: all.

        Until the constraint is ready, reading this computes it.
        """
        ...

    def feed(self, token_id: TokenId) -> Sequence[Delta]: ...

    def close(self) -> Sequence[Delta]: ...


class Spelled(NamedTuple):
    """A token's bytes. A silent one, such as the end of a turn, is never part of a text."""

    text: bytes
    is_silent: bool


def unspelled(token_id: TokenId) -> Spelled:
    """For engines that give no log-probabilities."""
    return Spelled(b"", is_silent=False)


class LogProbs:
    """Which log-probabilities of one choice go out with which text.

    A token's text may have to wait: the next token may make it a stop sequence, a call or thinking.
    Its log-probabilities wait with it. They go out with the text. If the token becomes no text,
    they are dropped. The runner writes `probs`, and draws no further token before `told`.
    """

    def __init__(self, num_top: int, spelled: Callable[[TokenId], Spelled]) -> None:
        self.probs = DrawnProbs(num_top)
        self._spelled = spelled
        self._waiting: list[DrawnToken] = []

    def told(
        self, token_id: TokenId, deltas: Sequence[Delta], *, is_thought: bool
    ) -> Sequence[Delta]:
        """The deltas that the parser made of this token, texts with their log-probabilities."""
        if is_thought:
            self._waiting = []
        elif not self._spelled(token_id).is_silent:
            drawn = self._prob(token_id, self.probs.drawn)
            likeliest = [self._prob(*token) for token in self.probs.top]
            self._waiting.append(DrawnToken(drawn, likeliest))
        return self.closed(deltas)

    def closed(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Deltas of the text that waited, with its log-probabilities."""
        shown_deltas: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                shown_deltas.append(msgspec.structs.replace(delta, logprobs=self._waiting))
            else:
                shown_deltas.append(delta)
            self._waiting = []
        return shown_deltas

    def _prob(self, token_id: TokenId, logprob: float) -> TokenProb:
        return TokenProb(self._spelled(token_id).text, token_id, logprob)
