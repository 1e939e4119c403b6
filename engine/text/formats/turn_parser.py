"""One choice's tokens to typed deltas: detokenize, look for stop strings, parse the format."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.ids import TokenId
from engine.protocol import Delta, FinishReason, TextDelta, ToolInputDelta, ToolUseStart
from engine.text.formats.calls import FormatParser
from engine.text.formats.stops import StopFinder
from engine.text.grammar import Constraint
from engine.text.tokens.detokenize import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """What ends a turn: any of the tokens, and, unless calls may be parallel, the first call."""

    token_ids: frozenset[TokenId]
    after_first_call: bool = False


class TurnParser:
    """An `engine.schedule.output.OutputParser`.

    Stop strings are looked for in what the model writes, before any format is parsed: no delta
    contains one. A `constraint` says which tokens may come, and ends the turn when it is complete.
    A call that is forced and cut off before its name leaves nothing behind (`forces_call`).
    `thinking_tokens` counts every token from the opening tag to the closing one.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopFinder,
        calls: FormatParser,
        end: TurnEnd,
        constraint: Constraint | None = None,
        *,
        forces_call: bool = False,
    ) -> None:
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._calls = calls
        self._end = end
        self._constraint = constraint
        self._forces_call = forces_call
        self._is_cut = False

    @property
    def end_token_ids(self) -> frozenset[TokenId]:
        return self._end.token_ids

    @property
    def grammar(self) -> str | None:
        """What `allowed` follows, for an engine that masks by itself; None where nothing binds."""
        return None if self._constraint is None else self._constraint.grammar

    @property
    def allowed(self) -> bytes | None:
        return None if self._constraint is None else self._constraint.allowed

    @property
    def mask(self) -> Constraint | None:
        return self._constraint

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        if self.finish is not None:
            return []
        was_thinking = self._calls.is_thinking
        if token_id in self._end.token_ids:
            self.thinking_tokens += was_thinking
            # Close before counting: a call may be whole without its closing tag.
            deltas = self._close(is_cut=False)
            if self.finish is None:
                self.finish = self._natural_end()
            return deltas
        deltas = self._take(self._detokenizer.feed(token_id))
        self.thinking_tokens += was_thinking or self._calls.is_thinking
        if self._constraint is not None:
            self._follow(self._constraint, token_id)
        return deltas

    def close(self) -> Sequence[Delta]:
        return self._close(is_cut=self.finish in (None, "stop_sequence", "failed"))

    def _close(self, *, is_cut: bool) -> list[Delta]:
        """`is_cut`: the model did not end the turn, so a call may be cut off inside its head."""
        deltas: list[Delta] = []
        if self.finish is None:
            deltas += self._take(self._detokenizer.flush())
        if self._is_cut:
            return deltas
        if self.finish is None:
            deltas += self._calls.feed(self._stops.flush())
        deltas += self._calls.close(is_cut=is_cut)
        if is_cut and self._forces_call:
            deltas = [delta for delta in deltas if not isinstance(delta, TextDelta)]
        return self._cut(deltas)

    def _follow(self, constraint: Constraint, token_id: TokenId) -> None:
        constraint.take(token_id)
        if self.finish is not None:
            return
        if constraint.is_failed:
            self.finish = "failed"
        elif constraint.is_complete:
            self.finish = self._natural_end()

    def _natural_end(self) -> FinishReason:
        return "tool_use" if self._calls.num_calls else "stop"

    def _take(self, text: str) -> list[Delta]:
        deltas = self._calls.feed(self._stops.feed(text)) if text else []
        if self._end.after_first_call and self._calls.num_calls:
            self.finish = "tool_use"
            deltas, self._is_cut = self._cut(deltas), True
        elif self._stops.found is not None:
            self.finish, self.stop_sequence = "stop_sequence", self._stops.found
        return deltas

    def _cut(self, deltas: list[Delta]) -> list[Delta]:
        """Without parallel calls, nothing behind the first one is told."""
        if not self._end.after_first_call or not self._calls.num_calls:
            return deltas
        num_kept = len(deltas)
        has_call = False
        for index, delta in enumerate(deltas):
            if isinstance(delta, ToolUseStart) and has_call:
                num_kept = min(num_kept, index)
            has_call = has_call or isinstance(delta, ToolUseStart | ToolInputDelta)
            if has_call and not isinstance(delta, ToolUseStart | ToolInputDelta):
                num_kept = min(num_kept, index)
        return deltas[:num_kept]
