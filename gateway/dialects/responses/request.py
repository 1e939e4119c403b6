"""The request body of POST /v1/responses and POST /v1/responses/input_tokens, and its decoding.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. A top-level null
counts as a missing field. Unknown top-level fields are errors. An output item of a response is
accepted verbatim. Items and tools get their types first (`typed.py`). Those that this server can't
carry out become `hosted`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Raw

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects import fields
from gateway.dialects.anthropic.request import CacheBreakpoint, CacheTtl, Strict
from gateway.dialects.bodies import bound_output, check_values, fields_of, read
from gateway.dialects.fields import Checking, Fields, Style, rules_of, undone_of
from gateway.dialects.lowering import HELD_BY_TTL, IN_MEMORY
from gateway.dialects.openai.request import JsonObjectFormat, Key, Refusal, TextFormat, explained
from gateway.dialects.responses.client_tools import TOOL_SEARCH
from gateway.dialects.responses.typed import id_of, typed_item, typed_list, typed_tool
from gateway.dialects.unknown import UNKNOWN, UnknownFields, written
from gateway.prompt.ignored import ADVICE, ADVICE_REASON, Notepad

Status = Literal["in_progress", "completed", "incomplete"]
MAX_ID_CHARACTERS = 1024
Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)]


MAX_ITEMS = 100_000
Length = Annotated[int, msgspec.Meta(ge=1, le=fields.MAX_COUNT)]
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]


def _parts(checking: Checking, value: str | list[Any], path: str) -> None:
    """Count a message's parts. They count instead of the message, which was counted as an item."""
    if isinstance(value, list):
        checking.num_blocks -= 1
        fields.blocks(checking, value, path)


def _client_input(checking: Checking, value: object, path: str) -> None:
    """Check a call's input. The path in a complaint is the whole item's."""
    fields.call_input(checking, value, path.removesuffix(".input"))


def _allowed(checking: Checking, value: str | dict[str, Any], path: str) -> None:
    listed = value.get("tools") if isinstance(value, dict) else None
    if isinstance(listed, list):
        fields.named_tools(checking, listed, f"{path}.tools")


class _Markable(Strict):
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputText(_Markable, tag="input_text", kw_only=True):
    text: str


class InputImage(_Markable, tag="input_image"):
    detail: str | None = None
    file_id: str | None = None
    image_url: str | None = None


class InputFile(_Markable, tag="input_file"):
    detail: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None


class OutputText(Strict, tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class SummaryText(Strict, tag="summary_text"):
    text: str


class ReasoningText(Strict, tag="reasoning_text"):
    text: str


InputPart = InputText | InputImage | InputFile
Part = InputPart | OutputText | Refusal


class _FromResponse(Strict):
    """The fields that an item has once it was in a response."""

    id: Id | None = None
    status: Status | None = None


class Message(_FromResponse, tag="message", kw_only=True):
    """A message of the client, or one that a response contained."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | list[Part], _parts]
    phase: str | None = None


class Reasoning(_FromResponse, tag="reasoning"):
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class OwnCall(_FromResponse, rename={"is_async": "async"}, kw_only=True):
    call_id: fields.Name
    name: fields.Name
    caller: Any = None
    is_async: bool | None = None
    namespace: str | None = None


class FunctionCall(OwnCall, tag="function_call", kw_only=True):
    arguments: fields.Arguments


class CustomToolCall(OwnCall, tag="custom_tool_call", kw_only=True):
    input: Annotated[str, _client_input]


class CallOutput(_FromResponse, kw_only=True):
    output: Annotated[str | list[InputPart], fields.blocks]
    caller: Any = None
    name: str | None = None


class CustomToolCallOutput(CallOutput, tag="custom_tool_call_output", kw_only=True):
    call_id: fields.Name


class FunctionCallOutput(CallOutput, tag="function_call_output", kw_only=True):
    """A function's output. Without a `call_id` it answers no call."""

    call_id: fields.Name | None = None
    namespace: str | None = None


class ClientCall(Strict, tag="client_call"):
    """A call of a vendor's tool that ran at the client. `input` is the call's action."""

    kind: str
    call_id: fields.Name
    input: Annotated[dict[str, Any], _client_input]


class ClientCallOutput(Strict, tag="client_call_output"):
    """The output of a `ClientCall`. `text` is the item's output, as JSON where it is no string."""

    kind: str
    call_id: fields.Name
    text: str


class HostedCall(Strict, tag="hosted_call", kw_only=True):
    """A call that the vendor's servers ran, with its output."""

    name: fields.Name
    call_id: fields.Name
    arguments: fields.Arguments
    output: str
    namespace: str | None = None


class ToolSearchCall(_FromResponse, tag="tool_search_call", kw_only=True):
    """A search for tools, by the client or by the vendor's servers.

    - `arguments`: an object, or its JSON
    - `call_id`: a search by the vendor's servers may have none
    """

    arguments: Annotated[Any, _client_input]
    call_id: fields.Name | None = None
    execution: Literal["client", "server"] | None = None


class Compaction(_FromResponse, tag="compaction", kw_only=True):
    """A summary that replaces the items that it sums up."""

    encrypted_content: str


class CompactionTrigger(_FromResponse, tag="compaction_trigger"):
    """An item that asks for a compaction instead of an answer."""


class ItemReference(Strict, tag="item_reference"):
    """An item of a response that is kept."""

    id: Id


class Hosted(Strict, tag="hosted"):
    """An item or a tool that is left out. `kind` is its type."""

    kind: str


class OwnTool(Strict, rename={"is_async": "async"}):
    """A tool that becomes a function of the prompt."""

    name: fields.Name
    allowed_callers: list[str] | None = None
    is_async: bool | None = None
    defer_loading: bool | None = None
    description: str | None = None


class FunctionTool(OwnTool, tag="function"):
    parameters: fields.Schema | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class GrammarInput(Strict, tag="grammar"):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomTool(OwnTool, tag="custom"):
    format: TextFormat | GrammarInput | None = None


class ToolSearch(OwnTool, tag="tool_search", kw_only=True):
    """The client's own search for tools."""

    name: fields.Name = TOOL_SEARCH
    execution: Literal["client"]
    parameters: fields.Schema | None = None


class ClientTool(OwnTool, tag="client"):
    """A tool that OpenAI defines and the client runs. Its name is its type."""


class NamespaceTool(Strict, tag="namespace"):
    name: fields.Name
    tools: Annotated[list[FunctionTool | CustomTool], fields.tools]
    description: str = ""


Tool = FunctionTool | CustomTool | ClientTool | NamespaceTool | ToolSearch | Hosted


class AdditionalTools(Strict, tag="additional_tools"):
    """Tools that are added to those of the request."""

    tools: Annotated[list[Tool], fields.tools]
    id: Id | None = None
    role: str | None = None


class JsonSchemaFormat(Strict, tag="json_schema"):
    """The output keeps to the schema, with or without `strict`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    schema: fields.Schema
    description: str | None = None
    strict: bool | None = None


class UpdatedReasoning(Strict):
    effort: Effort | None = None


class UpdatedText(Strict):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat


class ConfigurationUpdate(_FromResponse, tag="configuration_update"):
    """Settings that are in effect from here on. Missing settings stay as they were."""

    reasoning: UpdatedReasoning | None = None
    text: UpdatedText | None = None


class ToolSearchOutput(_FromResponse, tag="tool_search_output", kw_only=True):
    """The tools that a search found. The model may call them from here on."""

    tools: Annotated[list[Tool], fields.tools]
    call_id: fields.Name | None = None
    execution: Literal["client", "server"] | None = None


Item = (
    Message
    | Reasoning
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | ClientCall
    | ClientCallOutput
    | AdditionalTools
    | ToolSearchCall
    | ToolSearchOutput
    | Compaction
    | CompactionTrigger
    | ConfigurationUpdate
    | ItemReference
    | Hosted
    | HostedCall
)


class CacheOptions(Strict):
    """How the prompt is cached. `prewarm` writes it to the cache and generates nothing."""

    comparison_response_id: Key | None = None
    mode: Literal["implicit", "explicit"] = "implicit"
    prewarm: bool = False
    ttl: CacheTtl = "30m"


class ReasoningOptions(Strict):
    context: str | None = None
    effort: Effort | None = None
    generate_summary: Summary | None = None
    mode: str | None = None
    summary: Summary | None = None

    @property
    def wants_summary(self) -> bool:
        return self.summary is not None or self.generate_summary is not None


class StreamOptions(Strict):
    """The options of a stream. Obfuscation is never sent."""

    include_obfuscation: bool = False


class TextOptions(Strict):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class NamedTool(msgspec.Struct):
    """A choice of one tool. Further fields, which the vendor's own tools have, are not read."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


Choice = Annotated[Literal["auto", "none", "required"] | dict[str, Any], _allowed]


class Conversation(Strict):
    id: Id


class ResponsesRequest(Strict):
    """The fields of https://platform.openai.com/docs/api-reference/responses/create."""

    model: fields.Name
    input: str | Annotated[list[Item], msgspec.Meta(max_length=MAX_ITEMS), fields.blocks]
    cache_salt: fields.Salt | None = None
    conversation: Id | Conversation | None = None
    generate: bool = True
    include: list[str] = msgspec.field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: Length | None = None
    max_tool_calls: fields.Count | None = None
    metadata: Metadata = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: Id | None = None
    prompt_cache_key: Key | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: fields.Word | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: fields.Temperature | None = None
    text: TextOptions | None = None
    tool_choice: Choice = "auto"
    tools: Annotated[list[Tool], fields.tools] = msgspec.field(default_factory=list)
    top_logprobs: fields.TopLogprobs = 0
    top_p: fields.Share | None = None
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def conversation_id(self) -> str | None:
        conversation = self.conversation
        return conversation.id if isinstance(conversation, Conversation) else conversation

    @property
    def is_prewarm(self) -> bool:
        options = self.prompt_cache_options
        return not self.generate or (options is not None and options.prewarm)


class Decoded(NamedTuple):
    """A decoded body."""

    request: ResponsesRequest
    # The body's fields as they came, for the response's echo.
    fields: Mapping[str, Raw]
    # The fields without an effect.
    notepad: Notepad
    # How many of the input's first items are from stored responses.
    num_earlier: int = 0
    # The items that replace references, by their ids.
    named: Mapping[str, Raw] = {}

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def references(self) -> list[str]:
        """The ids in the input's references."""
        return [item.id for _, item in self.items() if isinstance(item, ItemReference)]

    def items(self) -> Iterator[tuple[str, Item]]:
        """The items of the input, each with its path."""
        items = self.request.input
        for index, item in enumerate([] if isinstance(items, str) else items, -self.num_earlier):
            path = f"previous[{index + self.num_earlier}]" if index < 0 else f"input[{index}]"
            yield path, item

    def behind(
        self, earlier: Sequence[Raw], others: Sequence[Raw], bounds: RequestBounds
    ) -> "Decoded":
        """The request with the `earlier` items, from kept responses, before its own. Each reference
        to an item of `others` is replaced by that item. Raise InvalidRequest or TooLarge as for a
        body that has all of it."""
        by_id = {id_of(item): item for item in others}
        named = {item_id: by_id[item_id] for item_id in self.references if item_id in by_id}
        joined = b"[%b]" % b",".join([*earlier, *named.values()])
        check_values(joined, bounds.max_json_values, bounds.max_object_keys)
        typed = typed_list(Raw(joined), "previous", _typed_item, Notepad())
        kept = _decoded_items(typed)
        items_by_id = dict(zip(named, kept[len(earlier) :], strict=True))
        items = self.request.input
        if isinstance(items, str):
            items = [Message(role="user", content=items)]
        items = [
            items_by_id.get(item.id, item) if isinstance(item, ItemReference) else item
            for item in items
        ]
        whole = msgspec.structs.replace(self.request, input=[*kept[: len(earlier)], *items])
        FIELDS.check(whole, bounds)
        return self._replace(request=whole, num_earlier=len(earlier), named=named)


class ConversationRequest(Strict):
    """A conversation to begin or to change, with items to add or with its metadata."""

    items: list[Raw] | None = None
    metadata: Metadata | None = None

    @property
    def raw(self) -> Raw:
        return Raw(msgspec.json.encode(self.items or []))


def decode_conversation(body: bytes, bounds: RequestBounds) -> ConversationRequest:
    """Decode a body. Raise InvalidRequest for a reference to an item and for malformed items, and
    TooLarge for a body beyond the bounds."""
    check_values(body or b"{}", bounds.max_json_values, bounds.max_object_keys)
    decoded: ConversationRequest = read(lambda: _conversation.decode(body or b"{}"), explained)
    typed = typed_list(decoded.raw, "items", _typed_item, Notepad())
    for index, item in enumerate(_decoded_items(typed)):
        if isinstance(item, ItemReference):
            raise InvalidRequest(f"items[{index}]: send the item itself", f"items[{index}]")
    return decoded


def items_of(value: Raw, stem: str, named: Mapping[str, Raw]) -> list[Raw]:
    """The items of an input as they are kept: whole, each with an id. `named` has the items that
    replace references, by id. New ids contain `stem`."""
    text = bytes(memoryview(value)[:1]) == b'"'
    user = {"role": "user", "content": value}
    raws = [Raw(msgspec.json.encode(user))] if text else _raws.decode(value)
    items = []
    for number, raw in enumerate(raws):
        item = _open.decode(raw)
        if item.keys() <= {"type", "id"}:
            items.append(named[item["id"]])
            continue
        if isinstance(item.get("content"), str) and item.get("type", "message") == "message":
            is_own = item["role"] == "assistant"
            part = {"type": "output_text" if is_own else "input_text", "text": item["content"]}
            item["content"] = [{**part, "annotations": []} if is_own else part]
        kind = item.setdefault("type", "message")
        if kind in _HAVE_STATUS:
            item["status"] = item.get("status") or "completed"
        item["id"] = item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{stem}i{number:02x}"
        items.append(Raw(msgspec.json.encode(item)))
    return items


LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log probabilities."""
REASONING = "reasoning.encrypted_content"
"""The value of `include` that asks for sealed thoughts."""
_SILENT = "access_programs client_metadata safety_identifier service_tier user"
FIELDS = Fields(
    style=Style("input: more than {} items and content parts"),
    rules=rules_of(ResponsesRequest),
    silent=frozenset(_SILENT.split()),
    told={
        "context_management": "a conversation is compacted only at /v1/responses/compact",
        "image": "this model reads no images",
        "personality": "this model has one personality",
        **dict.fromkeys(ADVICE, ADVICE_REASON),
    },
    refused={
        "background": (False,),
        "background_options": (),
        "moderation": (),
        "prompt": (),
        "stream_id": (),
        "type": ("response.create",),
    },
    undone=undone_of(
        {
            "truncation": ("this server leaves nothing out of a prompt", "disabled"),
            "text.verbosity": ("this model knows no verbosity", "medium"),
            "prompt_cache_retention": (HELD_BY_TTL, *IN_MEMORY),
            "reasoning.context": ("the model's template decides what it sees", "auto"),
            "reasoning.mode": ("there is one mode", "standard"),
        }
    ),
)
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_HAVE_STATUS = ("message", "function_call", "function_call_output")
_OURS = (ClientCall, ClientCallOutput, Hosted, HostedCall)
_ITEMS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Item) if kind not in _OURS)
_typed_item = partial(typed_item, known=_ITEMS)
_request = msgspec.json.Decoder(ResponsesRequest)
_LISTS = frozenset({"input", "tools"})
_UNKNOWN = UnknownFields(
    ResponsesRequest,
    _LISTS,
    markers=("prompt_cache_breakpoint",),
    marker_types=(CacheBreakpoint,),
    is_read=lambda name, item: True,
)
_items = msgspec.json.Decoder(list[Item])
_conversation = msgspec.json.Decoder(ConversationRequest)
_raws = msgspec.json.Decoder(list[Raw])
_open = msgspec.json.Decoder(dict[str, Any])


def decode_responses(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> Decoded:
    """Decode a body. Raise InvalidRequest, or TooLarge for one beyond the bounds."""
    whole = fields_of(body, bounds)
    notepad = Notepad()
    if "previous_response_id" in whole or "conversation" in whole:
        whole.setdefault("input", Raw(b"[]"))
    fields: dict[str, Any] = {**FIELDS.part(whole, bounds, notepad)}

    def typed() -> ResponsesRequest:
        for name, typed_one in (("input", _typed_item), ("tools", typed_tool)):
            if name in fields:
                fields[name] = typed_list(fields[name], name, typed_one, notepad)
        try:
            return _request.decode(msgspec.json.encode(fields))
        except msgspec.ValidationError:
            lists = {name: Raw(msgspec.json.encode(fields[name])) for name in _LISTS & {*fields}}
            rest, places = _UNKNOWN.leave_out(lists)
            if not places:
                raise
        for place in places:
            notepad.ignore(written(place), UNKNOWN)
        return _request.decode(msgspec.json.encode({**fields, **rest}))

    request = read(typed, explained)
    FIELDS.check(request, bounds)
    if request.previous_response_id is not None and request.conversation is not None:
        raise InvalidRequest("conversation: excludes previous_response_id", "conversation")
    if LOGPROBS in request.include:
        bound_output(request, "max_output_tokens", request.top_logprobs + 1, bounds)
    return Decoded(request, whole, notepad)


def _decoded_items(typed: Any) -> list[Item]:
    """The typed items, decoded. Unknown fields in them are left out."""
    body = msgspec.json.encode(typed)

    def decoded() -> list[Item]:
        try:
            return _items.decode(body)
        except msgspec.ValidationError:
            rest, places = _UNKNOWN.leave_out({"input": Raw(body)})
            if not places:
                raise
        return _items.decode(rest["input"])

    return read(decoded, explained)
