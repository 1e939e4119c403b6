"""From a Responses request to an Ask: prompt, slots, demands.

Tools come first, then `instructions` and the system and developer messages at the beginning, then
everything else in order; later system messages stay where they are. The request's tools become
functions of the prompt: those in a namespace get its name in front, a custom tool has one string,
`input`, and what only the vendor runs is left out. Where two names would be equal, the later one
gets a number.

Reasoning comes back from a client in `encrypted_content`. Its text is signed with the workspace's
scope, so that only what this installation wrote for this workspace is read as the model's own.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec

from engine.protocol import TextPart, ThinkingPart, Tool, ToolChoice, ToolResultPart, ToolUsePart
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.request import CacheBreakpoint
from gateway.dialects.custom_tools import GRAMMAR_REASON, INPUT, function_of
from gateway.dialects.lowering import (
    MAX_NAMED,
    NATIVE_LOOKBACK,
    Lowering,
    RequestContext,
    arguments_of,
    definition_of,
    input_of,
    sampling_of,
    split_data_url,
    text_in,
    uncallable,
)
from gateway.dialects.openai.request import JsonObjectFormat, Refusal
from gateway.dialects.responses import request as wire
from gateway.dialects.responses.client_tools import TOOL_SEARCH, arguments_in, described
from gateway.dialects.responses.response import MAX_ECHO_BYTES, Origin, unechoed
from gateway.prompt.ask import Ask, Compared, name_of
from gateway.prompt.ignored import Notepad
from gateway.prompt.media import Kind, Media

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")
_PREFIX = "resp_"
_MAX_SAID = 200
_SEALED = "hf1."
_DIGEST_BYTES = 16
_THOUGHT = b"thought"
COMPACTION = b"compaction"
NO_TRIGGER = "no response compacts its own conversation here: send it to /v1/responses/compact"
_encode = msgspec.json.Encoder().encode
KindT = TypeVar("KindT", wire.AllowedTools, wire.NamedTool)
_SEPARATOR = "__"
_KINDS: dict[type, str] = {
    wire.FunctionTool: "function",
    wire.CustomTool: "custom",
    wire.ToolSearch: TOOL_SEARCH,
}
_VENDORS = (wire.ClientTool, wire.ToolSearch)
"""Tools that the vendor has named."""
_SEARCHES = "Searches for more tools. Those that it comes to can be called from then on."
_NOTHING_LOADED = "No tools were loaded."
_SUMMARY = "Summary of the conversation up to here:"


@dataclass(frozen=True, slots=True)
class Prepared:
    """An Ask, its request, and the tools behind the functions of its prompt."""

    ask: Ask
    decoded: wire.Decoded
    origins: dict[str, Origin]


def prepare(decoded: wire.Decoded, context: RequestContext) -> Prepared:
    request = decoded.request
    notepad = decoded.notepad
    added = [item.tools for _, item in decoded.items() if isinstance(item, wire.AdditionalTools)]
    declared = chain(request.tools, *added)
    has_search = any(isinstance(tool, wire.ToolSearch) for tool in declared)
    lowering = _ResponsesLowering(context, notepad, defers=has_search)
    lowering.add_tools("tools", request.tools)
    form = request.text.format if request.text else None
    effort = request.reasoning.effort if request.reasoning else None
    for path, item in decoded.items():
        match item:
            case wire.AdditionalTools():
                lowering.add_tools(f"{path}.tools", item.tools)
            case wire.ToolSearchOutput():
                lowering.load(f"{path}.tools", item.tools)
            case wire.ConfigurationUpdate(reasoning=reasoning, text=text):
                form = form if text is None else text.format
                effort = effort if reasoning is None else reasoning.effort
    choice = _tool_choice(request, lowering)
    schema = form.schema if isinstance(form, wire.JsonSchemaFormat) else None
    if isinstance(form, JsonObjectFormat):
        schema = {"type": "object"}
    if request.is_prewarm:  # nothing is generated
        choice = ToolChoice()
        schema = None
    options = request.prompt_cache_options
    if options is None and request.is_prewarm:
        options = wire.CacheOptions(prewarm=True)
    if options is not None:
        lowering.native_ttl = options.ttl
    lowering.lay_out(decoded)
    if not lowering.messages:
        raise InvalidRequest("input: must have at least one message")
    if lowering.messages[-1].role == "assistant":
        raise InvalidRequest(
            "input: must not end with an item of the assistant, which is not continued"
        )
    is_implicit = options is not None and options.mode == "implicit"
    policy = context.principal.auto_cache if options is None else None
    named = list(islice(lowering.loaded.values(), MAX_NAMED))
    plan = lowering.plan(
        policy, None, named, cache_salt=request.cache_salt, adds_native=is_implicit
    )
    if wire.LOGPROBS in request.include:
        notepad.wish("include", "this model tells no log probabilities", "logprobs")
    wire.FIELDS.note(request, notepad)
    if request.store and not context.keeps_responses:
        notepad.ignore("store", "this server keeps no responses")
    if request.reasoning is not None and request.reasoning.wants_summary:
        notepad.ignore("reasoning.summary", "thinking is given whole")
    for name in unechoed(decoded.fields):
        notepad.ignore(name, f"longer than {MAX_ECHO_BYTES} bytes: the answer does not repeat it")
    thinks = effort not in (None, "none")
    # A response's id is its turn's, in OpenAI's form.
    previous = options.comparison_response_id if options else None
    ask = lowering.ask(
        "responses",
        plan,
        sampling_of(
            request,
            "responses",
            max_tokens=0 if request.is_prewarm else request.max_output_tokens,
            logprobs=request.top_logprobs if wire.LOGPROBS in request.include else None,
        ),
        "reasoning.effort" if thinks else None,
        tool_choice=choice,
        output_schema=schema,
        stream=request.stream,
        routing_key=request.prompt_cache_key,
        comparison=Compared(
            is_wanted=True,
            previous=None if previous is None else f"msg_{previous.removeprefix(_PREFIX)}",
        ),
        name=name_of(request.metadata),
    )
    return Prepared(ask, decoded, lowering.origins)


def _tool_choice(request: wire.ResponsesRequest, lowering: "_ResponsesLowering") -> ToolChoice:
    choice = request.tool_choice
    parallel = request.parallel_tool_calls
    if choice == "required":
        if not lowering.functions and request.tools:
            raise uncallable("tool_choice")
        if not lowering.functions:
            raise InvalidRequest("tool_choice: 'required' is only allowed with tools")
        return ToolChoice("any", parallel=parallel)
    if not isinstance(choice, dict):
        return ToolChoice(choice, parallel=parallel)
    if choice.get("type") != "allowed_tools":
        wanted = _converted(choice, wire.NamedTool)
        names_of_tool = lowering.find(wanted)
        if not names_of_tool:
            tool_name = (wanted.name or wanted.type)[:64]
            why = f"tool_choice: '{tool_name}' is not in tools that the model may call here"
            raise InvalidRequest(why, "tool_choice")
        return ToolChoice("tool", names_of_tool[0], parallel=parallel)
    allowed = _converted(choice, wire.AllowedTools)
    names = {name for tool in allowed.tools for name in lowering.find(tool)}
    names &= lowering.callable_names
    if allowed.mode == "required":
        if not names:
            raise uncallable("tool_choice")
        return ToolChoice("any", parallel=parallel, names=sorted(names))
    return lowering.allow("tool_choice", names, lowering.callable_names, parallel=parallel)


def _converted(choice: dict[str, Any], kind: type[KindT]) -> KindT:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        said = str(error)[:_MAX_SAID].replace("`", "'")
        raise InvalidRequest(f"tool_choice: {said}", "tool_choice") from None


def _origin_of(tool: wire.OwnTool, namespace: wire.NamespaceTool | None) -> Origin:
    kind = _KINDS.get(type(tool), tool.name)
    return Origin(tool.name, namespace.name if namespace else None, kind)


def _listed(
    path: str, tools: Sequence[wire.Tool]
) -> list[tuple[str, wire.OwnTool, wire.NamespaceTool | None]]:
    """The tools that become functions, those of namespaces among them, each with its path."""
    listed: list[tuple[str, wire.OwnTool, wire.NamespaceTool | None]] = []
    for index, entry in enumerate(tools):
        where = f"{path}[{index}]"
        if isinstance(entry, wire.OwnTool):
            listed.append((where, entry, None))
        elif isinstance(entry, wire.NamespaceTool):
            listed += [(f"{where}.tools[{n}]", tool, entry) for n, tool in enumerate(entry.tools)]
    return listed


def _joined(namespace: str, name: str) -> str:
    """The namespace's name in front, unless the name has it there."""
    if name.startswith(namespace):
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


class _ResponsesLowering(Lowering):
    """`functions` are those at the prompt's beginning, each with its path, `origins` the tools
    behind all functions. Where the client searches for tools itself, those with `defer_loading`
    are not at the beginning: `loaded` are the tools that a search came to."""

    lookback = NATIVE_LOOKBACK

    def __init__(self, context: RequestContext, notepad: Notepad, *, defers: bool) -> None:
        super().__init__(context)
        self.notepad = notepad
        self.functions: list[tuple[str, Tool]] = []
        self.loaded: dict[str, Tool] = {}
        self._defers = defers
        self._first_names: set[str] = set()
        # What each search came to, by the path of its tools.
        self._results: dict[str, list[Tool]] = {}
        self.origins: dict[str, Origin] = {}
        self._names: dict[Origin, str] = {}
        self._by_name: dict[tuple[str, str], list[str]] = {}

    def add_tools(self, path: str, tools: Sequence[wire.Tool]) -> None:
        """Raise InvalidRequest for a name that is empty or there twice, and for schemas that can't
        be sent to an engine."""
        listed = _listed(path, tools)
        # Functions without a namespace keep their names, whatever comes before them.
        names: dict[str, str] = {}
        for is_own in (True, False):
            for where, tool, namespace in listed:
                if is_own == (namespace is None and not isinstance(tool, _VENDORS)):
                    names[where] = self._reserve(where, tool, namespace)
        for where, tool, namespace in listed:
            if self._defers and tool.defer_loading:
                continue
            self.functions.append((where, self._function(where, names[where], tool, namespace)))
            self._first_names.add(names[where])

    def load(self, path: str, tools: Sequence[wire.Tool]) -> None:
        """Add the tools that a search came to. The latest definition of a tool counts, unless it is
        at the prompt's beginning. Raise InvalidRequest as `add_tools` does."""
        results = self._results.setdefault(path, [])
        for where, tool, namespace in _listed(path, tools):
            name = self._names.get(_origin_of(tool, namespace))
            if name is None:
                name = self._reserve(where, tool, namespace)
            function = self._function(where, name, tool, namespace)
            results.append(function)
            if name not in self._first_names:
                self.loaded.pop(name, None)
                self.loaded[name] = function

    @property
    def callable_names(self) -> set[str]:
        """The functions that the model may call: at the beginning, or loaded."""
        return self._first_names | self.loaded.keys()

    def find(self, wanted: wire.NamedTool) -> list[str]:
        """The prompt's names of the functions that a choice names, in the order of the tools."""
        name = wanted.name or wanted.type
        namespace = wanted.namespace
        return [
            function_name
            for function_name in self._by_name.get((name, wanted.type), ())
            if namespace is None or self.origins[function_name][:2] == (name, namespace)
        ]

    def _reserve(self, path: str, tool: wire.OwnTool, namespace: wire.NamespaceTool | None) -> str:
        if not tool.name:
            raise InvalidRequest(f"{path}.name: must not be empty", f"{path}.name")
        origin = _origin_of(tool, namespace)
        kind = origin.kind
        joined = _joined(namespace.name, tool.name) if namespace else tool.name
        is_free = namespace is not None or isinstance(tool, _VENDORS)
        if origin in self._names or (not is_free and joined in self.origins):
            raise InvalidRequest(f"{path}.name: tool names must be unique", f"{path}.name")
        first = joined
        number = 1
        while joined in self.origins:
            number += 1
            joined = f"{first}_{number}"
        for name in {origin.name, joined}:
            self._by_name.setdefault((name, kind), []).append(joined)
        self.origins[joined] = origin
        self._names[origin] = joined
        return joined

    def _function(
        self, path: str, name: str, tool: wire.OwnTool, namespace: wire.NamespaceTool | None
    ) -> Tool:
        if tool.defer_loading and not self._defers:
            self.notepad.ignore(f"{path}.defer_loading", "this server searches no tools")
        if tool.allowed_callers and "direct" not in tool.allowed_callers:
            self.notepad.ignore(f"{path}.allowed_callers", "the model calls all tools itself")
        description = tool.description
        if namespace is not None and namespace.description and namespace.tools[0] is tool:
            description = "\n\n".join(filter(None, (namespace.description, description)))
        if isinstance(tool, wire.ToolSearch):
            return self.tool(path, name, tool.parameters, description or _SEARCHES)
        if isinstance(tool, wire.FunctionTool):
            return self.tool(path, name, tool.parameters, description, strict=tool.strict)
        if isinstance(tool, wire.ClientTool):
            about, schema = described(tool.name)
            return Tool(name, schema, about)
        if isinstance(tool, wire.CustomTool) and isinstance(tool.format, wire.GrammarInput):
            self.notepad.ignore(f"{path}.format", GRAMMAR_REASON)
            form = tool.format
            return function_of(name, description, syntax=form.syntax, definition=form.definition)
        return function_of(name, description)

    def lay_out(self, decoded: wire.Decoded) -> None:
        """Raise InvalidRequest for content that no engine could be sent."""
        request = decoded.request
        for path, tool in self.functions:
            self.mark(path)
            self.tools.append(tool)
        if request.instructions:
            self.system.append(self._text("instructions", request.instructions))
        if isinstance(request.input, str):
            self.add("user", [self._text("input", request.input)])
            return
        ids = _search_ids(decoded)
        _check_answers(decoded)
        for path, item in decoded.items():
            self._lay_item(path, item, ids)

    def _lay_item(self, path: str, item: wire.Item, ids: Mapping[str, str]) -> None:
        """`ids` are those of searches, by the paths of their calls and outputs."""
        match item:
            case wire.Message():
                self._add_message(path, item)
            case wire.Reasoning():
                self._add_thought(path, item)
            case wire.FunctionCall():
                origin = Origin(item.name, item.namespace, "function")
                self._add_call(path, item.call_id, origin, arguments_of(item.arguments))
            case wire.CustomToolCall():
                origin = Origin(item.name, item.namespace, "custom")
                self._add_call(path, item.call_id, origin, {INPUT: item.input})
            case wire.ClientCall(kind=kind, input=asked):
                origin = Origin(kind, None, kind)
                action = input_of(arguments_in(kind, asked))
                self._add_call(path, item.call_id, origin, action)
            case wire.ToolSearchCall(arguments=asked) if path in ids:
                origin = Origin(TOOL_SEARCH, None, TOOL_SEARCH)
                written = asked if isinstance(asked, str) else _encode(asked).decode()
                self._add_call(path, ids[path], origin, arguments_of(written))
            case wire.ToolSearchCall():
                self.notepad.ignore(path, "a search that came to nothing")
            case wire.ToolSearchOutput():
                definitions = [definition_of(tool) for tool in self._results[f"{path}.tools"]]
                text = "\n".join(definitions) or _NOTHING_LOADED
                self._add_output(path, ids[path], text)
            case wire.HostedCall():
                origin = Origin(item.name, item.namespace, "hosted")
                self._add_call(path, item.call_id, origin, arguments_of(item.arguments))
                self._add_output(path, item.call_id, item.output)
            case wire.FunctionCallOutput(call_id=None):
                said = self._output_text(path, item.output)
                text = f"{item.name}:\n{said}" if item.name else said
                self.add("user", [self._text(path, text)])
            case wire.CustomToolCallOutput() | wire.FunctionCallOutput():
                self._add_output(path, item.call_id or "", item.output)
            case wire.ClientCallOutput(text=text):
                self._add_output(path, item.call_id, text)
            case wire.Compaction():
                self._add_summary(path, item)
            case wire.CompactionTrigger():
                raise InvalidRequest(f"{path}: {NO_TRIGGER}", path)
            case wire.ItemReference():
                why = "item references lead to nothing that is kept: send the item"
                raise InvalidRequest(f"{path}: {why}", path)

    def _add_message(self, path: str, item: wire.Message) -> None:
        where = f"{path}.content"
        if isinstance(item.content, str):
            parts = [self._text(where, item.content)]
        else:
            parts = [self._part(f"{where}[{n}]", part) for n, part in enumerate(item.content)]
        if item.role in ("system", "developer"):
            self.add_told(parts)
        else:
            self.add("assistant" if item.role == "assistant" else "user", parts)

    def _add_thought(self, path: str, item: wire.Reasoning) -> None:
        """The thought that we wrote, or one in words."""
        texts = (part.text for part in item.content or item.summary or [])
        thought: str | None = "\n\n".join(texts)
        if item.encrypted_content is not None:
            thought = unseal(item.encrypted_content, self.context.principal.scope)
        if thought is None:
            self.notepad.ignore(path, "reasoning that another server encrypted")
        elif thought:
            self.mark(path, can_carry=False)
            self.add("assistant", [ThinkingPart(thought)])

    def _add_summary(self, path: str, item: wire.Compaction) -> None:
        """Raise InvalidRequest for one of another server: without it the answer would be wrong."""
        scope = self.context.principal.scope
        summary = unseal(item.encrypted_content, scope, COMPACTION)
        if summary is None:
            raise InvalidRequest(
                f"{path}.encrypted_content: this server did not make this compaction, and can't"
                " read it: send the items that it stands for",
                path,
            )
        self.add("user", [self._text(path, f"{_SUMMARY}\n{summary}")])

    def _add_call(
        self, path: str, call_id: str, origin: Origin, arguments: dict[str, Any] | str
    ) -> None:
        """The tool may be one of the prompt no longer."""
        name = origin.name
        namespace = origin.namespace
        function_name = name if namespace is None else _joined(namespace, name)
        self.mark(path)
        self.add(
            "assistant", [ToolUsePart(call_id, self._names.get(origin, function_name), arguments)]
        )

    def _part(self, path: str, part: wire.Part) -> TextPart:
        match part:
            case wire.InputImage() | wire.InputFile():
                return self._text(path, self._shown(path, part), part.prompt_cache_breakpoint)
            case Refusal():
                return self._text(path, part.refusal)
            case wire.InputText():
                return self._text(path, part.text, part.prompt_cache_breakpoint)
            case wire.OutputText():
                return self._text(path, part.text)

    def _text(self, path: str, text: str, marker: CacheBreakpoint | None = None) -> TextPart:
        if marker is not None and not text:
            raise InvalidRequest(f"{path}: a breakpoint cannot be set for empty text")
        self.mark(path, native=marker)
        return TextPart(text)

    def _add_output(self, path: str, call_id: str, output: str | list[wire.InputPart]) -> None:
        """The parts make one segment, which ends where the last one does."""
        text = self._output_text(path, output)
        self.mark(path)
        self.add("user", [ToolResultPart(call_id, text)])

    def _output_text(self, path: str, output: str | list[wire.InputPart]) -> str:
        """The text of an output. A marker on its last part counts as one on the next slot."""
        if isinstance(output, str):
            return output
        texts: list[str] = []
        for number, part in enumerate(output):
            where = f"{path}.output[{number}]"
            marker = part.prompt_cache_breakpoint
            if isinstance(part, wire.InputText):
                texts.append(part.text)
            else:
                texts.append(self._shown(where, part))
            if marker is not None and number < len(output) - 1:
                raise InvalidRequest(f"{where}: only the last part of an output may be marked")
            if marker is not None:
                self.mark_native(marker)
        return "\n".join(texts)

    def _shown(self, path: str, part: wire.InputImage | wire.InputFile) -> str:
        """The text of a text file; what stands in for any other file."""
        if isinstance(part, wire.InputImage):
            media_type, data = split_data_url(part.image_url or "")
            name = "" if data else part.image_url or part.file_id or ""
            return self.stand_in(path, Media("image", media_type, data, name, part.detail))
        media_type, data = split_data_url(part.file_data or "")
        name = part.filename or part.file_url or part.file_id or ""
        text = text_in(data) if media_type.startswith(_TEXT_TYPES) else None
        if text is not None:
            return f"{name}\n{text}" if name else text
        kind: Kind = "document" if part.file_data else "file"
        return self.stand_in(path, Media(kind, media_type, data, name))


def _check_answers(decoded: wire.Decoded) -> None:
    """Each output answers a call before it, and each call has its output. Raise InvalidRequest."""
    pending: dict[str, int] = {}
    for _, item in decoded.items():
        match item:
            case wire.FunctionCall() | wire.CustomToolCall() | wire.ClientCall():
                pending[item.call_id] = pending.get(item.call_id, 0) + 1
            case wire.FunctionCallOutput(call_id=None):
                continue
            case (
                wire.CustomToolCallOutput(call_id=str(call_id))
                | wire.FunctionCallOutput(call_id=str(call_id))
                | wire.ClientCallOutput(call_id=call_id)
            ):
                if not pending.get(call_id):
                    raise _uncalled(call_id)
                pending[call_id] -= 1
    missing = [call_id for call_id, count in pending.items() if count]
    if missing:
        raise _unanswered(missing[0])


def _search_ids(decoded: wire.Decoded) -> dict[str, str]:
    """The id of each search's call and output, by their paths. One of the vendor's servers may have
    none: its output answers the first that has none before it. Such a call without an output is not
    there. Raise InvalidRequest for any other call or output that stands alone."""
    ids: dict[str, str] = {}
    pending: dict[str | None, deque[str]] = {}
    for path, item in decoded.items():
        match item:
            case wire.ToolSearchCall():
                pending.setdefault(item.call_id, deque()).append(path)
            case wire.ToolSearchOutput():
                calls = pending.get(item.call_id)
                if not calls:
                    raise _uncalled(item.call_id or "null")
                call_path = calls.popleft()
                ids[path] = ids[call_path] = item.call_id or f"search_{len(ids)}"
            case _:
                continue
    missing = [call_id for call_id, paths in pending.items() if call_id is not None and paths]
    if missing:
        raise _unanswered(missing[0])
    return ids


def _uncalled(call_id: str) -> InvalidRequest:
    message = f"No tool call found for function call output with call_id {call_id[:64]}."
    return InvalidRequest(message, "input")


def _unanswered(call_id: str) -> InvalidRequest:
    return InvalidRequest(f"No tool output found for function call {call_id[:64]}.", "input")


def seal(text: str, scope: str, purpose: bytes = _THOUGHT) -> str:
    """The text with a signature: of this installation, for this workspace and `purpose`."""
    written = text.encode()
    return _SEALED + urlsafe_b64encode(_digest(written, scope, purpose) + written).decode()


def unseal(sealed: str, scope: str, purpose: bytes = _THOUGHT) -> str | None:
    """The text, or None where somebody else wrote it, or for another purpose."""
    if not sealed.startswith(_SEALED):
        return None
    try:
        whole = b64decode(sealed[len(_SEALED) :].encode(), altchars=b"-_", validate=True)
    except ValueError:
        return None
    digest = whole[:_DIGEST_BYTES]
    text = whole[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(text, scope, purpose)):
        return None
    return text.decode()


def _digest(text: bytes, scope: str, purpose: bytes) -> bytes:
    return blake2b(
        text, digest_size=_DIGEST_BYTES, key=scope.encode()[:64], person=purpose
    ).digest()
