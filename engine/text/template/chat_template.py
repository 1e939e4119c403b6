"""A model's chat template, rendered as transformers does.

The environment is that of transformers' `utils/chat_template_utils.py`: sandboxed, trimmed blocks,
loop controls, `generation` blocks, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest
from engine.text.errors import TemplateRefused
from engine.text.template.marks import MarkedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """What a template sees of a prompt: OpenAI-style messages and tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    add_generation_prompt: bool = True
    thinking: bool = False


class ChatTemplate:
    """`sources` are templates by name: `default`, and `tool_use` where tools have their own.

    `special_tokens` (`bos_token`, …) are variables of the template. `now` is for templates that
    write the date.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = write_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except TemplateError as error:
            raise TemplateRefused(f"the chat template does not compile: {error}") from error
        if "default" not in self._templates:
            raise TemplateRefused("the model has no chat template")
        self._special_tokens = dict(special_tokens)
        self.source = "\n".join(sources.values())

    def render(self, given: TemplateInput) -> str:
        """Raises InvalidRequest where the template refuses the messages."""
        name = "tool_use" if given.tools and "tool_use" in self._templates else "default"
        try:
            return self._templates[name].render(
                messages=given.messages,
                tools=given.tools or None,
                documents=None,
                add_generation_prompt=given.add_generation_prompt,
                # Qwen3's name for it, and DeepSeek-V3.1's.
                enable_thinking=given.thinking,
                thinking=given.thinking,
                **self._special_tokens,
            )
        except _RaisedByTemplate as error:
            raise InvalidRequest(f"the chat template refuses the prompt: {error}") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Their words may quote the prompt; only what kind of error it was is told.
            kind = type(error).__name__
            raise InvalidRequest(f"the chat template fails on the prompt: {kind}") from error


class _RaisedByTemplate(TemplateError):
    """The template called `raise_exception` with words of its own."""


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)


class _GenerationBlock(Extension):
    """`{% generation %}`: marks what the assistant says, for training; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' `tojson`, which also writes the marks around marked objects."""

    def dump(inner: Any) -> str:
        written = json.dumps(
            inner, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return _ASCII_ESCAPED.sub(_escape, written) if ensure_ascii else written

    found: list[MarkedDict] = []
    text = dump(_extract(value, found))
    for marked in found:
        begin, end = marked.marks.begin, marked.marks.end
        text = text.replace(f'"{begin}"', begin + dump(dict(marked)) + end, 1)
    return text


# Private-use characters stay: they are marks, and no template escapes those by itself.
_ASCII_ESCAPED = re.compile("[^\x00-\x7f\ue000-\uf8ff\U000f0000-\U0010ffff]")


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]


def _extract(value: Any, found: list[MarkedDict]) -> Any:
    """The value with a placeholder string for every marked object in it."""
    if isinstance(value, MarkedDict):
        found.append(value)
        return value.marks.begin
    if isinstance(value, dict):
        return {key: _extract(inner, found) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_extract(inner, found) for inner in value]
    return value
