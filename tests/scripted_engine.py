"""The synthetic engine with a real template and a script: for tests of formats, end to end.

`SCRIPTED_MODEL`, a model's directory, gives tokenizer and chat template; `SCRIPTED_SCRIPT`, a JSON
object, says what is written. Everything is real but the model: rendering, tokens, cache, parsing.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from engine import __main__ as program
from engine.backends import local, synthetic
from engine.backends.base import Parts, Progress
from engine.backends.prepare.renderers import capabilities_of
from engine.cache.ids import TokenId
from engine.protocol import Delta, FinishReason, GenerateRequest, Prompt
from engine.schedule.output import OutputConstraint, OutputParser, Spelled
from engine.settings import Settings
from engine.text.formats.proof import FormatChoice
from engine.text.rendered import KnownDays, RenderedPrompt
from engine.text.renderer import ChatRenderer
from tests.engine.backends.local import thread_pool

_DEFAULT = "scripted"
CUT = "[cut]"
"""At the end of a script's text: there the limit of tokens is reached, and the answer is cut."""


def settings_of(model: str, script: Mapping[str, str]) -> dict[str, str]:
    return {"SCRIPTED_MODEL": model, "SCRIPTED_SCRIPT": json.dumps(script)}


def load(settings: Settings, progress: Progress) -> Parts:
    """The synthetic engine's parts with another renderer. Raises TemplateRefused."""
    parts = _load(settings, progress)
    renderer = ChatRenderer.from_model(
        os.environ["SCRIPTED_MODEL"],
        FormatChoice(tools=settings.tool_format, reasoning=settings.reasoning_format),
    )
    able = [capability for capability in parts.description.capabilities if capability != "tools"]
    has_strict = renderer.tool_format is not None and renderer.can_trigger
    description = msgspec.structs.replace(
        parts.description,
        model="scripted",
        capabilities=[*able, *capabilities_of(renderer, {"strict_tools": has_strict})],
        prefix_order=renderer.prefix_order,
        tool_format=renderer.tool_format,
        reasoning_format=renderer.reasoning_format,
    )
    script = json.loads(os.environ["SCRIPTED_SCRIPT"])
    return replace(parts, renderer=ScriptedRenderer(renderer, script), description=description)


class ScriptedRenderer:
    """Renders as a model's template does, and writes what the request or its turn names.

    The prompt's texts are gone when a parser is made. A stop sequence is still there and names a
    key; a name that the script's text does not contain stops nothing. Clients that send no stop
    sequence get `turn 1`, `turn 2` and so on: a workspace's requests with tools are counted from
    the start. So an agent, whatever it is, carries on for as many turns as the script has.
    """

    def __init__(self, inner: ChatRenderer, script: dict[str, str]) -> None:
        self._inner = inner
        self._script = script
        self._num_turns: Counter[str] = Counter()

    @property
    def writes_date(self) -> bool:
        return self._inner.writes_date

    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str, days: KnownDays | None = None
    ) -> RenderedPrompt:
        return self._inner.render(prompt, thinking=thinking, scope=scope, days=days)

    def parser(self, request: GenerateRequest) -> OutputParser:
        return self._inner.parser(request)

    def spelled(self, token_id: TokenId) -> Spelled:
        return self._inner.spelled(token_id)

    def parsers(self, request: GenerateRequest) -> Sequence[OutputParser]:
        return [self._scripted(request, inner) for inner in self._inner.parsers(request)]

    def _scripted(self, request: GenerateRequest, inner: OutputParser) -> "ScriptedParser":
        return ScriptedParser(inner, lambda: self._script_of(request))

    def _script_of(self, request: GenerateRequest) -> "Script":
        named = [key for key in request.sampling.stop_sequences if key in self._script]
        if not named and request.prompt.tools:
            self._num_turns[request.scope] += 1
            named = [f"turn {self._num_turns[request.scope]}"]
        text = self._script.get(named[0] if named else "", _DEFAULT)
        is_cut = text.endswith(CUT)
        token_ids = self._inner.tokenizer.encode(
            text.removesuffix(CUT), add_special_tokens=False
        ).ids
        end = [] if is_cut else sorted(self._inner.end_token_ids)[:1]
        return Script([*token_ids, *end], is_cut)


@dataclass(frozen=True, slots=True)
class Script:
    token_ids: Sequence[TokenId]
    is_cut: bool


class ScriptedParser:
    """Allows one token at a time: the script's next one.

    The script is chosen when the first token is asked for: parsers are also made only to try what
    a request demands, which is no turn.
    """

    def __init__(self, inner: OutputParser, script: Callable[[], Script]) -> None:
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self.end_token_ids = inner.end_token_ids
        self._inner = inner
        self._choose = script
        self._at = 0

    @cached_property
    def _script(self) -> Script:
        return self._choose()

    @property
    def constraint(self) -> OutputConstraint | None:
        return self._inner.constraint

    @property
    def allowed(self) -> bytes | None:
        if self._at >= len(self._script.token_ids):
            return self._inner.allowed
        token_id = self._script.token_ids[self._at]
        mask = bytearray(token_id // 8 + 1)
        mask[token_id // 8] = 1 << token_id % 8
        return bytes(mask)

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        inner = self._inner
        self._at = self._at + 1
        deltas = inner.feed(token_id)
        self.finish, self.stop_sequence = inner.finish, inner.stop_sequence
        self.thinking_tokens = inner.thinking_tokens
        if self._script.is_cut and self._at == len(self._script.token_ids):
            self.finish = "length"
        return deltas

    def close(self) -> Sequence[Delta]:
        return self._inner.close()


_load = synthetic.load_synthetic

if __name__ == "__main__":
    synthetic.load_synthetic = load
    local.new_pool = thread_pool
    sys.exit(program.main(["--backend", "synthetic"]))
