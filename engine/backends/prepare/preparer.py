"""A request's body to tokens, segments and names: everything that grows with a client's input."""

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.backends.base import Renderer, decoder_of
from engine.backends.prepare.checks import (
    check_demand,
    check_length,
    check_prompt,
    check_request,
    check_size,
    check_strict,
)
from engine.backends.prepare.prepared import (
    Answer,
    Counted,
    Prepared,
    Refused,
)
from engine.cache.digests import pack
from engine.cache.lookup import Segment
from engine.errors import EngineError, InvalidRequest, PromptTooLong, SchemaRefused, TooCostly
from engine.protocol import (
    CountReply,
    CountRequest,
    Description,
    GenerateRequest,
    HeldName,
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
    UnheldTool,
)
from engine.text.grammar import is_free
from engine.text.rendered import KnownDays, RenderedPrompt, SegmentSpan

Request = TypeVar("Request")

SPARE_BLOCKS = 2
"""What a prompt must leave of the pool: its next token's block, and one for copy-on-write."""
GRAMMAR_SECONDS = 2.0
"""Of the processor: what one request's grammar may take to compile."""
_decode_generate = decoder_of(GenerateRequest)
_decode_count = decoder_of(CountRequest)


class Preparer:
    """Answers bodies; knows no process. What the request itself is to blame for is `Refused`."""

    def __init__(
        self,
        renderer: Renderer,
        description: Description,
        grammar_seconds: float = GRAMMAR_SECONDS,
    ) -> None:
        self._renderer = renderer
        self._description = description
        self._grammar_seconds = grammar_seconds

    def generate(self, body: bytes, days: KnownDays | None = None) -> Answer:
        """`days` are for templates that write the date; without them they write today's."""
        return _answer(_decode_generate, self._generate, body, days)

    def count(self, body: bytes, days: KnownDays | None = None) -> Answer:
        """The segments' ends are those of the text, whatever blocks the engine shares."""
        return _answer(_decode_count, self._count, body, days)

    def _count(self, request: CountRequest, days: KnownDays | None) -> Counted:
        check_prompt(request.prompt)
        rendered = self._rendered(request, days)
        ends = [span.end for span in rendered.segments]
        return Counted(reply=CountReply(len(rendered.token_ids), ends))

    def _generate(self, request: GenerateRequest, days: KnownDays | None) -> Prepared:
        check_size(request.prompt)
        check_request(request, self._description)
        check_demand(request)
        rendered = self._rendered(request, days)
        if is_bound(request):
            self._compile(request)
        request, unheld = self._held(request)
        # A server of conversations renders them once more.
        is_chat = "own_template" not in self._description.capabilities
        kept = request if is_chat else without_texts(request)
        marked = {point.segment for point in request.breakpoints}
        return msgspec.structs.replace(
            prepare(request, rendered, self._description, kept),
            unheld=unheld,
            folded=list(rendered.folded),
            inexact=sorted(one for one in marked if not rendered.segments[one].is_exact),
            dated=rendered.dated,
            own_seconds=max((point.seconds or 0.0 for point in request.breakpoints), default=0.0),
        )

    def _rendered(
        self, request: GenerateRequest | CountRequest, days: KnownDays | None
    ) -> RenderedPrompt:
        check_size(request.prompt)
        check_length(request.prompt, self._description)
        return self._renderer.render(
            request.prompt, thinking=request.thinking, scope=request.scope, days=days
        )

    def _held(self, request: GenerateRequest) -> tuple[GenerateRequest, list[UnheldTool]]:
        """The request without `strict` where no grammar can hold a call that the model may make."""
        if not is_free(request):
            return request, []
        if "strict_tools" not in self._description.capabilities:
            return without_strict(request, lambda _: True), []
        if not self._refusal(request):
            return request, []
        # Which of them is at fault is only asked where some are.
        unheld: dict[str, str] = {}
        for tool in request.prompt.callable_tools:
            if tool.strict and (reason := self._refusal(_only(request, tool))):
                unheld[tool.name] = reason
        held = without_strict(request, unheld.__contains__)
        if is_free(held) and (reason := self._refusal(held)):
            names = [tool.name for tool in held.prompt.callable_tools if tool.strict]
            unheld |= dict.fromkeys(names, reason)
            held = without_strict(request, lambda _: True)
        return held, [UnheldTool(name, reason) for name, reason in unheld.items()]

    def _compile(self, request: GenerateRequest) -> None:
        """Try what the engine will compile: what is too much ends this process, not the engine.

        Raise SchemaRefused also where it takes long: the engine's threads compile for all scopes.
        """
        begun = time.thread_time()
        self._renderer.parser(request)
        if time.thread_time() - begun > self._grammar_seconds:
            raise SchemaRefused(
                "the schemas are too much together: their grammar takes more than"
                f" {self._grammar_seconds:g} seconds to compile"
            )

    def _refusal(self, request: GenerateRequest) -> str:
        try:
            check_strict(request)
            self._compile(request)
        except SchemaRefused as error:
            return str(error)
        return ""


def _answer(
    decode: Callable[[bytes], Request],
    prepare_one: Callable[[Request, KnownDays | None], Answer],
    body: bytes,
    days: KnownDays | None,
) -> Answer:
    try:
        return prepare_one(decode(body), days)
    except RecursionError:
        error: EngineError = InvalidRequest("prompt: nested too deeply")
    except MemoryError:
        error = TooCostly("memory")
    except EngineError as refusal:
        error = refusal
    return Refused(code=error.code, message=str(error), is_public=error.is_public)


def prepare(
    request: GenerateRequest,
    rendered: RenderedPrompt,
    description: Description,
    kept: GenerateRequest,
) -> Prepared:
    """The parts of a rendered request that the engine needs; `kept` is the part that is read later.

    Raises InvalidRequest for no tokens, and PromptTooLong.
    """
    tokens = rendered.token_ids
    if not tokens:
        raise InvalidRequest("prompt: has no tokens")
    room = (description.num_blocks - SPARE_BLOCKS) * description.block_size
    longest = min(description.max_context_tokens - 1, room)
    if len(tokens) > longest:
        raise PromptTooLong(len(tokens), longest)
    names, reached = list[HeldName](), 0
    for name in request.names:
        # An unknown boundary counts as the one in front of it.
        offset = rendered.segments[name.segment].offset(name.characters)
        reached = max(reached, offset or 0)
        names.append(HeldName(name.digest, reached))
    return Prepared(
        request=msgspec.json.encode(kept),
        token_ids=pack(tokens),
        segments=new_segments(request.prompt, rendered.segments, description.granularity),
        names=names,
    )


def new_segments(prompt: Prompt, spans: list[SegmentSpan], granularity: int) -> list[Segment]:
    """The segments for the look-back, with ends floored to the granularity."""
    ends = [None if s.end is None else s.end - s.end % granularity for s in spans]
    if prompt.text is not None:
        return [Segment("text", ends[0])]
    segments = [Segment("tool", end) for end in ends[: len(prompt.tools)]]
    for _ in prompt.system:
        segments.append(Segment("text", ends[len(segments)]))
    for turn, message in enumerate(prompt.messages):
        for part in message.parts:
            end = ends[len(segments)]
            match part:
                case TextPart():
                    segments.append(Segment("text", end, turn))
                case ThinkingPart():
                    segments.append(Segment("thinking", end, turn))
                case ToolUsePart():
                    segments.append(Segment("tool_use", end, turn))
                case ToolResultPart():
                    segments.append(Segment("tool_result", end, turn))
    return segments


def _only(request: GenerateRequest, tool: Tool) -> GenerateRequest:
    prompt = msgspec.structs.replace(request.prompt, tools=[tool], named_tools=[])
    return msgspec.structs.replace(request, prompt=prompt)


def without_strict(request: GenerateRequest, is_loose: Callable[[str], bool]) -> GenerateRequest:
    """The request in which the tools of these names are not strict."""

    def loosened(tools: list[Tool]) -> list[Tool]:
        return [
            msgspec.structs.replace(tool, strict=False) if is_loose(tool.name) else tool
            for tool in tools
        ]

    tools, named = loosened(request.prompt.tools), loosened(request.prompt.named_tools)
    prompt = msgspec.structs.replace(request.prompt, tools=tools, named_tools=named)
    return msgspec.structs.replace(request, prompt=prompt)


def is_bound(request: GenerateRequest) -> bool:
    """Whether the output must keep to a schema."""
    return request.output_schema is not None or request.tool_choice.mode in ("any", "tool")


def may_compile(request: GenerateRequest) -> bool:
    """Whether the request's parsers compile a grammar."""
    return is_bound(request) or is_free(request)


def without_texts(request: GenerateRequest) -> GenerateRequest:
    """The request with as much of its prompt as an output's parser asks for."""
    prompt = request.prompt
    if prompt.text is not None:
        return msgspec.structs.replace(request, prompt=Prompt([], text=""))
    # Some formats of calls are read by the schemas' types.
    keeps = is_bound(request) or request.tool_choice.mode != "none"
    tools = [
        Tool(tool.name, tool.input_schema if keeps else {}, strict=tool.strict)
        for tool in prompt.callable_tools
    ]
    messages: list[Message] = []
    if prompt.messages:
        last = prompt.messages[-1]
        parts: list[Part] = []
        if any(isinstance(part, ToolResultPart) for part in last.parts):
            parts.append(ToolResultPart("", ""))
        if last.parts and isinstance(last.parts[-1], ThinkingPart):
            parts.append(ThinkingPart(""))
        elif last.parts:
            parts.append(TextPart(""))
        messages = [Message(last.role, parts)]
    return msgspec.structs.replace(request, prompt=Prompt(messages, tools))
