"""Turns a request's body into tokens, segments and names. All work that grows with a client's input
is done here.

The bounds of a request are checked before any step that costs more than reading it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from hashlib import sha256
from typing import Any

import msgspec

from engine.backends.decoding import decoded
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
    Unsupported,
)
from engine.protocol import (
    ALLOWED_TOOLS,
    IMAGE_REFERENCE,
    MAX_RECORD_BYTES,
    TTLS,
    Breakpoint,
    Capability,
    CountReply,
    CountRequest,
    Document,
    GenerateRequest,
    HeldName,
    Message,
    Name,
    OwnTemplateField,
    Part,
    Prompt,
    SegmentKind,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
    UnheldTool,
    needs_own_template,
)
from engine.protocol.reports import Description
from engine.text.rendered import KnownDays, RenderedPrompt, SegmentSpan

_OWN_TEMPLATE: dict[OwnTemplateField, str] = {
    "prompt.text": "prompt.text: a raw prompt",
    "messages": "messages: a last message of the assistant, to be continued,",
}
MAX_SEGMENTS = 100_000
"""The most tools, system blocks and message parts of one request together."""
MAX_STOPS = 1_024
MAX_STOP_BYTES = 65_536
"""The most bytes of all stop strings together, as UTF-8."""
MAX_SCHEMA_BYTES = 262_144
"""The most bytes of all schemas that constrain one output, as JSON."""
MAX_SCHEMA_PROPERTIES = 1_024
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NESTING = 1_536
"""The most levels of a schema, together with those of all that its references name."""
MAX_SCHEMA_PATTERNS = 32
MAX_SCHEMA_MULTIPLE = 100_000
"""The largest `multipleOf`, read without its decimal point."""


def check_request(request: GenerateRequest, description: Description) -> None:
    """Check all of a request but its prompt's length. The protocol's types bound single fields.

    Raise InvalidRequest, SchemaRefused or Unsupported. The message names the field.
    """
    _check_places(request)
    _check_capabilities(request, description)
    _check_values(request)
    _check_tool_choice(request)
    _check_stops(request.sampling.stop_sequences)
    check_schemas(_constraining_schemas(request))


def _check_places(request: GenerateRequest) -> None:
    """Raise InvalidRequest for a breakpoint, a document or a name at a segment that is missing."""
    num_segments = request.prompt.num_segments
    fields: dict[str, Sequence[Breakpoint | Document | Name]] = {
        "breakpoints": request.breakpoints,
        "documents": request.documents,
        "names": request.names,
    }
    for field, placed in fields.items():
        for index, place in enumerate(placed):
            if place.segment >= num_segments:
                raise InvalidRequest(f"{field}[{index}].segment: no such segment")


def _check_capabilities(request: GenerateRequest, description: Description) -> None:
    needed: dict[Capability, bool] = {
        "tools": bool(request.prompt.callable_tools),
        "forced_tools": request.tool_choice.mode in ("any", "tool"),
        "structured_output": request.constrains_text,
        "thinking": request.thinking,
        "images": bool(request.prompt.images),
    }
    for capability, is_needed in needed.items():
        if is_needed and capability not in description.capabilities:
            raise Unsupported(f"this engine does not declare the capability {capability!r}")
    for field, capability in request.sampling.needs:
        if capability not in description.capabilities:
            raise Unsupported(
                f"{field}: this engine does not declare the capability {capability!r}"
            )
    if "own_template" not in description.capabilities:
        _check_foreign_template(request)


def _check_foreign_template(request: GenerateRequest) -> None:
    """Raise Unsupported for a prompt that the model's server can't render with its own template."""
    for field in needs_own_template(request.prompt):
        raise Unsupported(
            f"{_OWN_TEMPLATE[field]} is not supported: the model's server renders its own prompts"
        )


def _check_values(request: GenerateRequest) -> None:
    sampling = request.sampling
    if not request.prompt.num_segments:
        raise InvalidRequest("prompt: must not be empty")
    if len(request.record.encode()) > MAX_RECORD_BYTES:
        raise InvalidRequest(f"record: at most {MAX_RECORD_BYTES} bytes")
    if sampling.num_choices > 1 and sampling.max_tokens == 0:
        raise InvalidRequest("sampling.num_choices: must be 1 where max_tokens is 0")
    if not 0 <= (request.lease_share or 0) <= 1:
        raise InvalidRequest("lease_share: must be 0 to 1")
    if request.output_schema is not None and request.output_pattern is not None:
        raise InvalidRequest("output_pattern: excludes output_schema")
    if sampling.min_tokens and is_constrained(request):
        raise InvalidRequest("sampling.min_tokens: must be 0 where the output is constrained")
    if sampling.allowed_token_ids and may_compile(request):
        raise InvalidRequest(
            "sampling.allowed_token_ids: must be empty where the output or a call is constrained"
        )


def _check_tool_choice(request: GenerateRequest) -> None:
    choice = request.tool_choice
    names = {tool.name for tool in request.prompt.callable_tools}
    if choice.mode in ("any", "tool") and not names:
        raise InvalidRequest("tool_choice: there are no tools to choose from")
    if choice.names and choice.mode not in ("any", "auto"):
        raise InvalidRequest("tool_choice.names: only for the modes `any` and `auto`")
    if not names.issuperset(choice.names):
        raise InvalidRequest("tool_choice.names: no such tool")
    if choice.mode == "tool" and choice.name not in names:
        raise InvalidRequest("tool_choice.name: no such tool")


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"sampling.stop_sequences: at most {MAX_STOPS}")
    if sum(len(stop.encode()) for stop in stops) > MAX_STOP_BYTES:
        raise InvalidRequest(f"sampling.stop_sequences: at most {MAX_STOP_BYTES} bytes together")


def _constraining_schemas(request: GenerateRequest) -> list[tuple[str, dict[str, Any]]]:
    """The schemas that constrain the output, each with its field.

    All other schemas are only text of the prompt.
    """
    choice = request.tool_choice
    schemas: list[tuple[str, dict[str, Any]]] = []
    is_forced = choice.mode in ("any", "tool")
    if is_forced or (request.constrains_text and choice.mode == "auto"):
        schemas += [
            (f"tools[{index}].input_schema", tool.input_schema)
            for index, tool in enumerate(request.prompt.callable_tools)
            if choice.allows(tool.name)
        ]
    if request.output_schema is not None:
        schemas.append(("output_schema", request.output_schema))
    return schemas


def check_prompt(prompt: Prompt) -> None:
    """Raise InvalidRequest for too many segments, and for a raw text with anything beside it."""
    if prompt.text is not None and (prompt.messages or prompt.callable_tools or prompt.system):
        raise InvalidRequest("prompt.text: excludes messages, tools and system")
    if prompt.num_segments + len(prompt.named_tools) > MAX_SEGMENTS:
        raise InvalidRequest(f"prompt: at most {MAX_SEGMENTS} tools, blocks and parts")


class _SchemaSize:
    """The sizes of one schema that are bounded, and its references."""

    def __init__(self, schema: dict[str, Any]) -> None:
        # The number of nested levels.
        self.depth = 0
        self.num_properties = 0
        # The number of `patternProperties`.
        self.num_patterns = 0
        # The largest `multipleOf`, read without its decimal point (`_digits`).
        self.multiple = 0
        # The value of each `$ref`.
        self.references: set[str] = set()
        for level in _levels(schema):
            self.depth += 1
            for value in level:
                if isinstance(value, dict):
                    self._add(value)

    def _add(self, value: dict[str, Any]) -> None:
        self.num_properties += _size(value.get("properties"))
        self.num_patterns += _size(value.get("patternProperties"))
        self.multiple = max(self.multiple, _digits(value.get("multipleOf")))
        reference = value.get("$ref")
        if isinstance(reference, str):
            self.references.add(reference)


def check_schemas(schemas: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raise SchemaRefused if schemas are too large. It names the schema, its size and the bound.

    Each schema comes with its field. All of them constrain one output together.

    llguidance (1.9) does not bound three things:

    - It compiles the target of a `$ref` inside of the schema that names it, with 4 KB of its
      thread's stack for each level. 8 MiB end the process.
    - `multipleOf` becomes an automaton with a state for each remainder. A million takes ten seconds
      and 400 MB.
    - It compares each of an object's `patternProperties` with each of its other properties.
    """
    num_bytes = 0
    num_properties = 0
    num_patterns = 0
    for where, schema in schemas:
        num_bytes += len(msgspec.json.encode(schema))
        size = _SchemaSize(schema)
        num_properties += size.num_properties
        num_patterns += size.num_patterns
        for value, most, unit in (
            (size.depth, MAX_SCHEMA_DEPTH, "levels"),
            (num_bytes, MAX_SCHEMA_BYTES, "bytes of schemas"),
            (num_properties, MAX_SCHEMA_PROPERTIES, "properties of schemas"),
            (num_patterns, MAX_SCHEMA_PATTERNS, "`patternProperties` of schemas"),
            (size.multiple, MAX_SCHEMA_MULTIPLE, "as the digits of `multipleOf`"),
        ):
            if value > most:
                raise SchemaRefused(f"{where}: {value} {unit} > {most} maximum")
        # Add the levels of all that references name. Many references may name the same value, so
        # each value is measured only once.
        depths = {id(schema): size.depth}
        nested = size.depth
        for target in _targets(schema, size.references):
            if id(target) not in depths:
                depths[id(target)] = sum(1 for _ in _levels(target))
            nested += depths[id(target)]
        if nested > MAX_SCHEMA_NESTING:
            raise SchemaRefused(
                f"{where}: {nested} levels with all that `$ref` names"
                f" > {MAX_SCHEMA_NESTING} maximum"
            )
        if size.references and not _can_end(schema):
            raise SchemaRefused(
                f"{where}: can't be guaranteed: what it requires refers to itself without an end"
            )


def _can_end(schema: dict[str, Any]) -> bool:
    """Whether a value of finite length can follow the schema.

    Its references may require each other without an end. The search begins with subschemas that
    need no other one. It goes on to those that need only these. Each need is looked at once.
    """
    # By subschema, the numbers of its lists of which no choice is known to be finite yet.
    lacking: dict[int, set[int]] = {}
    # By subschema, each other one that has it as a choice, and the number of that list.
    needed_by: dict[int, list[tuple[int, int]]] = {}
    waiting: list[Any] = [schema]
    finite: list[int] = []
    while waiting:
        subschema = waiting.pop()
        if id(subschema) in lacking:
            continue
        needs = list(_needs(schema, subschema)) if isinstance(subschema, dict) else []
        lacking[id(subschema)] = set(range(len(needs)))
        if not needs:
            finite.append(id(subschema))
        for number, choices in enumerate(needs):
            for choice in choices:
                needed_by.setdefault(id(choice), []).append((id(subschema), number))
                waiting.append(choice)
    while finite:
        for user, number in needed_by.pop(finite.pop(), ()):
            if number in lacking[user]:
                lacking[user].remove(number)
                if not lacking[user]:
                    finite.append(user)
    return not lacking[id(schema)]


def _needs(schema: dict[str, Any], subschema: dict[str, Any]) -> Iterator[list[Any]]:
    """Lists of schemas. A value of `subschema` must contain or follow one schema of each list."""

    def listed(name: str) -> list[Any]:
        value = subschema.get(name)
        return value if isinstance(value, list) else []

    reference = subschema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield [*_targets(schema, [reference])]
    yield from ([branch] for branch in listed("allOf"))
    yield from filter(None, (listed("anyOf"), listed("oneOf")))
    properties = subschema.get("properties")
    if subschema.get("type") == "object" and isinstance(properties, dict):
        required = filter(properties.__contains__, map(str, listed("required")))
        yield from ([properties[name]] for name in required)
    if subschema.get("type") == "array" and subschema.get("minItems"):
        yield [subschema.get("items")]


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _levels(value: Any) -> Iterator[list[Any]]:
    """The objects and lists of a JSON value by level, the outermost first."""
    level = [value] if isinstance(value, dict | list) else []
    while level:
        yield level
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def _digits(number: Any) -> int:
    """The digits of a number as an integer: 25 of 0.25, 250 of 250, and 1 of any power of ten."""
    if not isinstance(number, int | float) or isinstance(number, bool):
        return 0
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    if not isinstance(exponent, int):
        return 0  # no JSON has such a number
    written = "".join(map(str, digits)) + "0" * min(max(exponent, 0), 400)
    return 1 if written.rstrip("0") == "1" else int(written)


def _targets(schema: Any, references: Iterable[str]) -> Iterator[Any]:
    """The parts of the schema that references name. A wrong reference names the whole schema.

    The library compiles each part once, at worst one inside of another.
    """
    for reference in references:
        target = schema
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                target = schema
                break
        yield target


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
        fields = [field for field, _ in _constraining_schemas(request)]
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


def without_strict(request: GenerateRequest, is_loose: Callable[[str], bool]) -> GenerateRequest:
    """The request with `strict` removed from the tools whose names `is_loose` accepts."""

    def loosened(tools: list[Tool]) -> list[Tool]:
        return [
            msgspec.structs.replace(tool, strict=False) if is_loose(tool.name) else tool
            for tool in tools
        ]

    tools = loosened(request.prompt.tools)
    named = loosened(request.prompt.named_tools)
    prompt = msgspec.structs.replace(request.prompt, tools=tools, named_tools=named)
    return msgspec.structs.replace(request, prompt=prompt)


def without_names(request: GenerateRequest) -> GenerateRequest:
    """The request in which the mode `auto` allows all tools. Other modes stay as they are."""
    choice = request.tool_choice
    if choice.mode != "auto" or not choice.names:
        return request
    free = msgspec.structs.replace(choice, names=[])
    return msgspec.structs.replace(request, tool_choice=free)


def unconstrained(request: GenerateRequest) -> GenerateRequest:
    """The request with all constraints on calls among free text removed."""
    return without_strict(without_names(request), lambda _: True)


def is_constrained(request: GenerateRequest) -> bool:
    """Whether a schema, a pattern or a forced call constrains the whole output."""
    return request.constrains_text or request.tool_choice.mode in ("any", "tool")


def may_compile(request: GenerateRequest) -> bool:
    """Whether the request's parsers compile a grammar."""
    return is_constrained(request) or request.constrains_calls


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
