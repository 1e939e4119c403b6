"""One choice's tokens to typed deltas: detokenize, look for stop strings, parse the format."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.blocks.block import TokenId
from engine.prompt.detokenize import Detokenizer
from engine.prompt.stops import StopFinder
from engine.prompt.toolcalls import FormatParser
from engine.protocol import Delta, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """What ends a turn: any of the tokens, and, unless calls may be parallel, the first call."""

    token_ids: frozenset[TokenId]
    after_first_call: bool = False


class TurnParser:
    """An `engine.core.output.OutputParser`.

    Stop strings are looked for in what the model writes, before any format is parsed: no delta
    contains one.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: StopFinder, calls: FormatParser, end: TurnEnd
    ) -> None:
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._calls = calls
        self._end = end

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        if self.finish is not None:
            return []
        if token_id in self._end.token_ids:
            # Close before counting: a call may be whole without its closing tag.
            deltas = self.close()
            if self.finish is None:
                self.finish = "tool_use" if self._calls.num_calls else "stop"
            return deltas
        return self._take(self._detokenizer.feed(token_id))

    def close(self) -> Sequence[Delta]:
        deltas: list[Delta] = []
        if self.finish is None:
            deltas += self._take(self._detokenizer.flush())
        if self.finish is None:
            deltas += self._calls.feed(self._stops.flush())
        return [*deltas, *self._calls.close()]

    def _take(self, text: str) -> list[Delta]:
        deltas = self._calls.feed(self._stops.feed(text)) if text else []
        if self._end.after_first_call and self._calls.num_calls:
            self.finish = "tool_use"
        elif self._stops.found is not None:
            self.finish, self.stop_sequence = "stop_sequence", self._stops.found
        return deltas
