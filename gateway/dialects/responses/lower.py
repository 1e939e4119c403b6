"""From a Responses request to an Ask: prompt, slots and demands.

The prompt has the tools first, then `instructions` and the system and developer messages at the
beginning, then everything else in order. Later system messages stay where they are.

The request's tools become functions of the prompt. A tool of a namespace has the namespace's name
before its own. A custom tool has one string, `input`. Tools that only the vendor runs are left out.
Where two names would be equal, the later one gets a number.

A client sends reasoning back in `encrypted_content`. Its text is signed with the workspace's scope.
So a text is read as the model's own only if this installation wrote it for this workspace.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.protocol import TextPart, ThinkingPart, Tool, ToolChoice, ToolResultPart, ToolUsePart
from gateway.base.errors import InvalidRequest, why_not_kept
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
from gateway.dialects.openai.request import JsonObjectFormat, Refusal, TextFormat
from gateway.dialects.responses import request as wire
from gateway.dialects.responses.client_tools import TOOL_SEARCH, arguments_in, described
from gateway.dialects.responses.response import MAX_ECHO_BYTES, Origin, unechoed
from gateway.prompt.ask import Ask, Compared, name_of
from gateway.prompt.ignored import Notepad
from gateway.prompt.media import Kind, Media
from gateway.prompt.plan import Plan

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")
_PREFIX = "resp_"
_MAX_ERROR_CHARACTERS = 200
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
"""Types of tools whose names are the vendor's."""
_SEARCHES = "Searches for more tools. Those that it comes to can be called from then on."
_NOTHING_LOADED = "No tools were loaded."
_SUMMARY = "Summary of the conversation up to here:"


@dataclass(frozen=True, slots=True)
class Prepared:
    """An Ask, and what the writer of its answer needs."""

    ask: Ask
    decoded: wire.Decoded
    # The request's tools, by the names of their functions in the prompt.
    origins: dict[str, Origin]


def prepare(decoded: wire.Decoded, context: RequestContext) -> Prepared:
    """The Ask of a request. Raise InvalidRequest for what can't be asked of an engine."""
    request = decoded.request
    lowering = _lowering_of(decoded, context)
    settings = _settings_of(decoded)
    choice = _tool_choice(request, lowering)
    schema = _schema_of(settings.form)
    options = request.prompt_cache_options
    if request.is_prewarm:
        # Nothing is generated.
        choice = ToolChoice()
        schema = None
        options = options or wire.CacheOptions(prewarm=True)
    plan = _plan_of(decoded, lowering, options)
    _note_ignored(decoded, keeps_responses=context.keeps_responses)
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
        "reasoning.effort" if settings.effort not in (None, "none") else None,
        tool_choice=choice,
        output_schema=schema,
        stream=request.stream,
        routing_key=request.prompt_cache_key,
        comparison=Compared(
            is_wanted=True,
            # A response's id is its turn's, in OpenAI's form.
            previous=None if previous is None else f"msg_{previous.removeprefix(_PREFIX)}",
        ),
        name=name_of(request.metadata),
    )
    return Prepared(ask, decoded, lowering.origins)


def _lowering_of(decoded: wire.Decoded, context: RequestContext) -> "_ResponsesLowering":
    """A lowering that has the request's tools, and those of its input too."""
    request = decoded.request
    items = list(decoded.items())
    added = [item.tools for _, item in items if isinstance(item, wire.AdditionalTools)]
    declared = chain(request.tools, *added)
    has_search = any(isinstance(tool, wire.ToolSearch) for tool in declared)
    lowering = _ResponsesLowering(context, decoded.notepad, defers=has_search)
    lowering.add_tools("tools", request.tools)
    for path, item in items:
        if isinstance(item, wire.AdditionalTools):
            lowering.add_tools(f"{path}.tools", item.tools)
        elif isinstance(item, wire.ToolSearchOutput):
            lowering.load(f"{path}.tools", item.tools)
    return lowering


class _Settings(NamedTuple):
    """The settings that an item of the input may change."""

    form: TextFormat | JsonObjectFormat | wire.JsonSchemaFormat | None
    effort: str | None


def _settings_of(decoded: wire.Decoded) -> _Settings:
    """The request's settings, as the last item leaves them."""
    request = decoded.request
    form = request.text.format if request.text else None
    effort = request.reasoning.effort if request.reasoning else None
    for _, item in decoded.items():
        if isinstance(item, wire.ConfigurationUpdate):
            form = form if item.text is None else item.text.format
            effort = effort if item.reasoning is None else item.reasoning.effort
    return _Settings(form, effort)


def _schema_of(
    form: TextFormat | JsonObjectFormat | wire.JsonSchemaFormat | None,
) -> dict[str, Any] | None:
    """The schema that binds the answer's text; None where nothing does."""
    if isinstance(form, wire.JsonSchemaFormat):
        return form.schema
    return {"type": "object"} if isinstance(form, JsonObjectFormat) else None


def _plan_of(
    decoded: wire.Decoded, lowering: "_ResponsesLowering", options: wire.CacheOptions | None
) -> Plan:
    if options is not None:
        lowering.native_ttl = options.ttl
    lowering.lay_out(decoded)
    if not lowering.messages:
        raise InvalidRequest("input: must have at least one message")
    if lowering.messages[-1].role == "assistant":
        raise InvalidRequest(
            "input: must not end with an item of the assistant, which is not continued"
        )
    return lowering.plan(
        lowering.context.principal.auto_cache if options is None else None,
        None,
        list(islice(lowering.loaded.values(), MAX_NAMED)),
        cache_salt=decoded.request.cache_salt,
        adds_native=options is not None and options.mode == "implicit",
    )


def _note_ignored(decoded: wire.Decoded, *, keeps_responses: bool) -> None:
    """Note the fields that have no effect."""
    request = decoded.request
    notepad = decoded.notepad
    if wire.LOGPROBS in request.include:
        notepad.wish("include", "this model tells no log probabilities", "logprobs")
    wire.FIELDS.note(request, notepad)
    if request.store and not keeps_responses:
        notepad.ignore("store", "this server keeps no responses")
    if request.reasoning is not None and request.reasoning.wants_summary:
        notepad.ignore("reasoning.summary", "thinking is given whole")
    for name in unechoed(decoded.fields):
        notepad.ignore(name, f"longer than {MAX_ECHO_BYTES} bytes: the answer does not repeat it")


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
        tool = _converted(choice, wire.NamedTool)
        function_names = lowering.find(tool)
        if not function_names:
            tool_name = (tool.name or tool.type)[:64]
            message = f"tool_choice: '{tool_name}' is not in tools that the model may call here"
            raise InvalidRequest(message, "tool_choice")
        return ToolChoice("tool", function_names[0], parallel=parallel)
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
        message = str(error)[:_MAX_ERROR_CHARACTERS].replace("`", "'")
        raise InvalidRequest(f"tool_choice: {message}", "tool_choice") from None


def _origin_of(tool: wire.OwnTool, namespace: wire.NamespaceTool | None) -> Origin:
    kind = _KINDS.get(type(tool), tool.name)
    return Origin(tool.name, namespace.name if namespace else None, kind)


class _PlacedTool(NamedTuple):
    """A tool that becomes a function, with its path and its namespace."""

    path: str
    tool: wire.OwnTool
    namespace: wire.NamespaceTool | None


def _own_tools(path: str, tools: Sequence[wire.Tool]) -> list[_PlacedTool]:
    """The tools that become functions, those of namespaces among them."""
    own_tools: list[_PlacedTool] = []
    for index, entry in enumerate(tools):
        entry_path = f"{path}[{index}]"
        if isinstance(entry, wire.OwnTool):
            own_tools.append(_PlacedTool(entry_path, entry, None))
        elif isinstance(entry, wire.NamespaceTool):
            for number, tool in enumerate(entry.tools):
                own_tools.append(_PlacedTool(f"{entry_path}.tools[{number}]", tool, entry))
    return own_tools


def _may_be_renamed(place: tuple[str, wire.OwnTool, wire.NamespaceTool | None]) -> bool:
    """Whether the tool's function may get another name. A client's function outside of namespaces
    keeps its name."""
    _, tool, namespace = place
    return namespace is not None or isinstance(tool, _VENDORS)


def _joined(namespace: str, name: str) -> str:
    """The name with the namespace's name before it, unless it begins with that already."""
    if name.startswith(namespace):
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


class _ResponsesLowering(Lowering):
    """Lowers one request. With `defers` the client searches for tools itself. Then tools with
    `defer_loading` do not stand at the prompt's beginning."""

    lookback = NATIVE_LOOKBACK

    def __init__(self, context: RequestContext, notepad: Notepad, *, defers: bool) -> None:
        super().__init__(context)
        self.notepad = notepad
        # The functions at the prompt's beginning, each with its tool's path.
        self.functions: list[tuple[str, Tool]] = []
        # The functions that searches found, by their names.
        self.loaded: dict[str, Tool] = {}
        # The tools behind all functions, by the functions' names.
        self.origins: dict[str, Origin] = {}
        self._defers = defers
        # The names of `functions`.
        self._first_names: set[str] = set()
        # What each search found, by the path of its tools.
        self._results: dict[str, list[Tool]] = {}
        # The function's name of each tool.
        self._names: dict[Origin, str] = {}
        # The functions' names by a tool's name and kind.
        self._by_name: dict[tuple[str, str], list[str]] = {}

    def add_tools(self, path: str, tools: Sequence[wire.Tool]) -> None:
        """Add tools to the prompt's beginning. Raise InvalidRequest for an empty or a repeated
        name, and for a schema that can't be sent to an engine."""
        own_tools = _own_tools(path, tools)
        # The client's functions without a namespace are named first, so they keep their names.
        names: dict[str, str] = {}
        for place in sorted(own_tools, key=_may_be_renamed):
            names[place.path] = self._reserve(*place)
        for place in own_tools:
            if self._defers and place.tool.defer_loading:
                continue
            name = names[place.path]
            self.functions.append((place.path, self._function(name, place)))
            self._first_names.add(name)

    def load(self, path: str, tools: Sequence[wire.Tool]) -> None:
        """Add the tools that a search found. The latest definition of a tool counts, unless the
        tool is at the prompt's beginning. Raise InvalidRequest as `add_tools` does."""
        results = self._results.setdefault(path, [])
        for place in _own_tools(path, tools):
            name = self._names.get(_origin_of(place.tool, place.namespace))
            if name is None:
                name = self._reserve(*place)
            function = self._function(name, place)
            results.append(function)
            if name not in self._first_names:
                self.loaded.pop(name, None)
                self.loaded[name] = function

    @property
    def callable_names(self) -> set[str]:
        """The names of the functions that the model may call: those at the beginning and the loaded
        ones."""
        return self._first_names | self.loaded.keys()

    def find(self, tool: wire.NamedTool) -> list[str]:
        """The names of the functions behind a tool that a choice names, in the tools' order."""
        name = tool.name or tool.type
        namespace = tool.namespace
        return [
            function_name
            for function_name in self._by_name.get((name, tool.type), ())
            if namespace is None or self.origins[function_name][:2] == (name, namespace)
        ]

    def _reserve(self, path: str, tool: wire.OwnTool, namespace: wire.NamespaceTool | None) -> str:
        """Choose the name of a tool's function, and return it. Raise InvalidRequest for a tool
        without a name, and for one that is there already."""
        if not tool.name:
            raise InvalidRequest(f"{path}.name: must not be empty", f"{path}.name")
        origin = _origin_of(tool, namespace)
        kind = origin.kind
        joined = _joined(namespace.name, tool.name) if namespace else tool.name
        is_doubled = joined in self.origins and not _may_be_renamed((path, tool, namespace))
        if origin in self._names or is_doubled:
            raise InvalidRequest(f"{path}.name: tool names must be unique", f"{path}.name")
        unique = joined
        number = 1
        while unique in self.origins:
            number += 1
            unique = f"{joined}_{number}"
        for name in {origin.name, unique}:
            self._by_name.setdefault((name, kind), []).append(unique)
        self.origins[unique] = origin
        self._names[origin] = unique
        return unique

    def _function(self, name: str, place: _PlacedTool) -> Tool:
        """The function of a tool, under its name in the prompt."""
        path, tool, namespace = place
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
        """Add the tools, the instructions and the input to the prompt. Raise InvalidRequest for
        content that can't be sent to an engine."""
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
        """Add an item. `ids` has the ids of searches, by the paths of their calls and outputs."""
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
            case wire.ClientCall(kind=kind, input=action_input):
                origin = Origin(kind, None, kind)
                action = input_of(arguments_in(kind, action_input))
                self._add_call(path, item.call_id, origin, action)
            case wire.ToolSearchCall(arguments=arguments) if path in ids:
                origin = Origin(TOOL_SEARCH, None, TOOL_SEARCH)
                if not isinstance(arguments, str):
                    arguments = _encode(arguments).decode()
                self._add_call(path, ids[path], origin, arguments_of(arguments))
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
                text = self._output_text(path, item.output)
                if item.name:
                    text = f"{item.name}:\n{text}"
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
                cause = why_not_kept(self.context.keeps_responses)
                raise InvalidRequest(
                    f"{path}: item references lead to nothing that is kept: {cause} Send the item"
                    " itself, as clients do with `store` set to false.",
                    path,
                )

    def _add_message(self, path: str, item: wire.Message) -> None:
        where = f"{path}.content"
        if isinstance(item.content, str):
            parts = [self._text(where, item.content)]
        else:
            parts = [
                self._part(f"{where}[{index}]", part) for index, part in enumerate(item.content)
            ]
        if item.role in ("system", "developer"):
            self.add_told(parts)
        else:
            self.add("assistant" if item.role == "assistant" else "user", parts)

    def _add_thought(self, path: str, item: wire.Reasoning) -> None:
        """Add a thought: one that this gateway sealed, or one in plain text."""
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
        """Add a compaction's summary. Raise InvalidRequest for a compaction of another server:
        without the summary the answer would be wrong."""
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
        """Add a call. Its tool may be missing from the prompt by now."""
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
        """Add an output. Its parts make one segment, which ends with the last part."""
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
        """The text of a text file, or the placeholder of any other file."""
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
    """Raise InvalidRequest unless each output answers a call before it and each call has an
    output."""
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
    """The id of each search's call and output, by their paths.

    A search of the vendor's servers may have no id. An output without an id answers the first such
    call before it. Such a call without an output gets no id here. Raise InvalidRequest for any
    other call or output that stands alone.
    """
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
    """The text with this installation's signature for this workspace and `purpose`."""
    content = text.encode()
    return _SEALED + urlsafe_b64encode(_digest(content, scope, purpose) + content).decode()


def unseal(sealed: str, scope: str, purpose: bytes = _THOUGHT) -> str | None:
    """The sealed text. None where the signature is not this installation's for this workspace and
    `purpose`."""
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
