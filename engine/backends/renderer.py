"""What a backend must be able to do with prompts and tokens.

Workers import this: it needs neither an event loop nor the engine's settings.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.cache.ids import TokenId
from engine.protocol import GenerateRequest, Prompt
from engine.schedule.output import OutputParser, Spelled
from engine.text.rendered import KnownDays, RenderedPrompt


class Renderer(Protocol):
    """Prompt to tokens, tokens to deltas. `render` may be slow: workers do it.

    The render cache is kept apart by `scope`, so that its speed reveals nothing of other scopes.
    `parsers` makes a parser for each choice. It compiles the request's grammar once, without the
    interpreter's lock, and raises InvalidRequest if it can't. If `writes_date`, `days` say which
    date the template writes. `spelled` gives the text that a token stands for.
    """

    @property
    def writes_date(self) -> bool: ...
    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str, days: KnownDays | None = None
    ) -> RenderedPrompt: ...
    def parsers(self, request: GenerateRequest) -> Sequence[OutputParser]: ...
    def spelled(self, token_id: TokenId) -> Spelled: ...
