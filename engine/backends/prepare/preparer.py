"""Turns a request's body into tokens, segments and names. All work that grows with a client's input
is done here.

The bounds of a request are checked before any step that costs more than reading it.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256

import msgspec

from engine.backends.decoding import decoded
from engine.backends.prepare.checks import check_prompt, check_request
from engine.backends.prepare.constraints import (
    constraining_schemas,
    is_constrained,
    unconstrained,
    without_names,
    without_strict,
)
from engine.backends.prepare.images import ImageCheck, shown
from engine.backends.prepare.prepared import (
    Answer,
    Counted,
    Grammar,
    Job,
    Postponed,
    Prepared,
    Refused,
)
from engine.backends.prepare.schemas import check_schemas
from engine.backends.renderer import Renderer
from engine.cache.digests import pack
from engine.cache.lookup import Segment
from engine.errors import (
    EngineError,
    InvalidRequest,
    PromptTooLong,
    SchemaRefused,
    SchemaTooCostly,
    TooCostly,
)
from engine.protocol import (
    ALLOWED_TOOLS,
    IMAGE_REFERENCE,
    TTLS,
    CountReply,
    CountRequest,
    GenerateRequest,
    HeldName,
    Message,
    Part,
    Prompt,
    SegmentKind,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
    UnheldTool,
)
from engine.protocol.reports import Description
from engine.text.rendered import KnownDays, RenderedPrompt, SegmentSpan

SPARE_BLOCKS = 2
"""The blocks that a prompt must leave free: one for its next token, and one for copy-on-write."""
_SEGMENTS: dict[type[Part], SegmentKind] = {
    TextPart: "text",
    ThinkingPart: "thinking",
    ToolUsePart: "tool_use",
    ToolResultPart: "tool_result",
}


class PostponedError(Exception):
    """The grammar of this digest must not be compiled now."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(digest)
        self.digest = digest


class Preparer:
    """Prepares requests' bodies. A request at fault is answered with `Refused`. It knows no
    process."""

    def __init__(
        self,
        renderer: Renderer,
        description: Description,
        compiling: Callable[[Grammar], AbstractContextManager[object]] = nullcontext,
        grammar_seconds: float = 0.0,
    ) -> None:
        """Grammars are compiled within the context `compiling`.

        It raises SchemaTooCostly for a grammar that is known to take more than `grammar_seconds`,
        and PostponedError for one that must wait. It ends the process if a grammar takes longer.
        """
        self._renderer = renderer
        self._description = description
        self._compiling = compiling
        self._grammar_seconds = grammar_seconds
        self._images = ImageCheck()

    def answer(self, job: Job) -> Answer:
        """The answer to a job. Without `days` a template that writes a date writes today's."""
        try:
            if job.kind == "count":
                request = decoded(job.body, CountRequest)
                check_prompt(request.prompt)
                rendered = self._rendered(request, job.days)
                # The exact ends. They are not floored to the engine's granularity.
                ends = [span.end for span in rendered.segments]
                reply = CountReply(len(rendered.token_ids), ends)
                images = shown(request.prompt, rendered)
                token_ids = pack(rendered.token_ids) if images else b""
                return Counted(reply=reply, images=images, token_ids=token_ids)
            return self._generate(decoded(job.body, GenerateRequest), job.days)
        except PostponedError as postponed:
            return Postponed(postponed.digest)
        except RecursionError:
            error: EngineError = InvalidRequest("prompt: nested too deeply")
        except MemoryError:
            error = TooCostly("memory")
        except EngineError as refusal:
            error = refusal
        return Refused(code=error.code, message=str(error), is_public=error.is_public)

    def _generate(self, request: GenerateRequest, days: KnownDays | None) -> Prepared:
        check_prompt(request.prompt)
        check_request(request, self._description)
        rendered = self._rendered(request, days)
        unheld = list[UnheldTool]()
        if is_constrained(request):
            with self._compiling(self._grammar_of(request)):
                self._renderer.parsers(request)
        elif request.constrains_calls:
            request, unheld = self._as_guaranteed(request)
        kept = without_texts(request)
        if "own_template" not in self._description.capabilities or (
            self._description.backend == "upstream" and request.prompt.images
        ):
            # The server renders the conversation once more, so its texts are kept.
            prompt = msgspec.structs.replace(request.prompt, images=[])
            kept = msgspec.structs.replace(request, prompt=prompt)
        marked = {point.segment for point in request.breakpoints}
        return msgspec.structs.replace(
            prepare(request, rendered, self._description, kept),
            unheld=unheld,
            folded=list(rendered.folded),
            inexact=sorted(
                segment for segment in marked if not rendered.segments[segment].is_exact
            ),
            dated=rendered.dated,
            lease_seconds=max(
                (point.seconds or TTLS[point.ttl].seconds for point in request.breakpoints),
                default=0.0,
            ),
        )

    def _rendered(
        self, request: GenerateRequest | CountRequest, days: KnownDays | None
    ) -> RenderedPrompt:
        """The rendered prompt.

        Raises PromptTooLong before the rendering if the text would not fit into the context even in
        tokens of `longest_token_bytes`. A value of 0 means that the tokenizer has no such bound.
        """
        prompt = request.prompt
        longest = self._description.longest_token_bytes
        if longest:
            # Only the client's texts count. A template may write objects shorter than they came.
            texts = [prompt.text or "", *(block.text for block in prompt.system)]
            parts = (part for message in prompt.messages for part in message.parts)
            texts += [part.text for part in parts if not isinstance(part, ToolUsePart)]
            if prompt.images:
                texts = [IMAGE_REFERENCE.sub("", text) for text in texts]
            num_bytes = sum(len(text.encode()) for text in texts)
            room = self._description.max_context_tokens - 1
            if num_bytes > room * longest:
                raise PromptTooLong(math.ceil(num_bytes / longest), room)
        self._images.check(prompt.images)
        return self._renderer.render(
            prompt, thinking=request.thinking, scope=request.scope, days=days
        )

    def _as_guaranteed(self, request: GenerateRequest) -> tuple[GenerateRequest, list[UnheldTool]]:
        """The request without `strict` for tools whose calls no grammar can guarantee.

        The demands that can't be guaranteed are returned with it.
        """
        if "strict_tools" not in self._description.capabilities:
            return unconstrained(request), []
        try:
            with self._compiling(self._grammar_of(request)):
                return self._as_compiled(request)
        except SchemaTooCostly as error:
            tools = [tool for tool in request.prompt.callable_tools if tool.strict]
            unheld = [UnheldTool(tool.name, str(error)) for tool in tools]
            if request.tool_choice.names:
                unheld.append(UnheldTool(ALLOWED_TOOLS, str(error)))
            return unconstrained(request), unheld

    def _as_compiled(self, request: GenerateRequest) -> tuple[GenerateRequest, list[UnheldTool]]:
        """The same as `_as_guaranteed`, for a grammar that is not too costly to compile."""
        if not self._refusal(request):
            return request, []
        # The grammar of all tools failed, so each is tried by itself.
        unheld: dict[str, str] = {}
        for tool in request.prompt.callable_tools:
            prompt = msgspec.structs.replace(request.prompt, tools=[tool], named_tools=[])
            single = msgspec.structs.replace(without_names(request), prompt=prompt)
            reason = self._refusal(single) if tool.strict else ""
            if reason:
                unheld[tool.name] = reason
        loosened = without_strict(request, unheld.__contains__)
        reason = self._refusal(loosened) if loosened.constrains_calls else ""
        if reason:
            names = [tool.name for tool in loosened.prompt.callable_tools if tool.strict]
            if loosened.tool_choice.names:
                names.append(ALLOWED_TOOLS)
            unheld |= dict.fromkeys(names, reason)
            loosened = unconstrained(request)
        return loosened, [UnheldTool(name, reason) for name, reason in unheld.items()]

    def _grammar_of(self, request: GenerateRequest) -> Grammar:
        """The question about the request's grammar.

        The engine will compile that grammar. It is compiled here first, so that a too costly one
        ends this process alone. The digest covers the scope, so that no workspace learns by time
        what another one asked for.
        """
        tools = [
            (tool.name, tool.input_schema, tool.strict) for tool in request.prompt.callable_tools
        ]
        demands = (request.tool_choice, request.output_schema, request.output_pattern)
        decisive = (request.scope, request.thinking, tools, demands)
        digest = sha256(msgspec.msgpack.encode(decisive)).digest()
        fields = [field for field, _ in constraining_schemas(request)]
        if request.output_pattern is not None:
            fields.append("output_pattern")
        whose = "the schemas are too much together: their"
        if len(fields) == 1:
            whose = f"{fields[0]}: its"
        seconds = f"{self._grammar_seconds:g} seconds"
        return Grammar(
            digest,
            f"{whose} grammar takes more than {seconds} of processor time to compile",
            is_optional=request.constrains_calls,
        )

    def _refusal(self, request: GenerateRequest) -> str:
        """Why no grammar can guarantee the strict tools' schemas; empty: one can."""
        tools = [tool for tool in request.prompt.callable_tools if tool.strict]
        try:
            check_schemas((f"tool `{tool.name}`", tool.input_schema) for tool in tools)
            self._renderer.parsers(request)
        except SchemaRefused as error:
            return str(error)
        return ""


def check_length(num_tokens: int, description: Description) -> None:
    """Raise PromptTooLong for more tokens than the context or the pool has room for."""
    room = (description.num_blocks - SPARE_BLOCKS) * description.block_size
    longest = min(description.max_context_tokens - 1, room)
    if num_tokens > longest:
        raise PromptTooLong(num_tokens, longest)


def prepare(
    request: GenerateRequest,
    rendered: RenderedPrompt,
    description: Description,
    kept: GenerateRequest,
) -> Prepared:
    """A rendered request as the engine needs it. `kept` is the request without what nobody reads.

    Raises InvalidRequest for a prompt without tokens, and PromptTooLong.
    """
    tokens = rendered.token_ids
    if not tokens:
        raise InvalidRequest("prompt: has no tokens")
    check_length(len(tokens), description)
    names = list[HeldName]()
    reached = 0
    for name in request.names:
        # A name without a boundary gets that of the name before it.
        offset = rendered.segments[name.segment].offset(name.characters)
        reached = max(reached, offset or 0)
        names.append(HeldName(name.digest, reached))
    images = shown(request.prompt, rendered)
    granularity = 1 if images else description.granularity
    return Prepared(
        request=msgspec.json.encode(kept),
        token_ids=pack(tokens),
        segments=new_segments(request.prompt, rendered.segments, granularity),
        names=names,
        images=images,
        begins=[
            rendered.segments[document.segment].offset(0) or 0 for document in request.documents
        ],
    )


def new_segments(prompt: Prompt, spans: list[SegmentSpan], granularity: int) -> list[Segment]:
    """The segments for the look-back. Their ends are floored to the granularity, in tokens."""
    ends = [None if s.end is None else s.end - s.end % granularity for s in spans]
    if prompt.text is not None:
        return [Segment("text", ends[0])]
    first = len(prompt.tools) + len(prompt.system)
    segments = [Segment("tool", end) for end in ends[: len(prompt.tools)]]
    segments += [Segment("text", end) for end in ends[len(prompt.tools) : first]]
    parts = [(turn, part) for turn, message in enumerate(prompt.messages) for part in message.parts]
    for end, (turn, part) in zip(ends[first:], parts, strict=True):
        segments.append(Segment(_SEGMENTS[type(part)], end, turn))
    return segments


def without_texts(request: GenerateRequest) -> GenerateRequest:
    """The request with only those parts of its prompt that the parsers of its output read."""
    prompt = request.prompt
    if prompt.text is not None:
        return msgspec.structs.replace(request, prompt=Prompt([], text=""))
    # Some formats of calls are parsed by the types in the schemas.
    keeps = is_constrained(request) or request.tool_choice.mode != "none"
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
