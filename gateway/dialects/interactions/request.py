"""The request body of POST /v1beta/interactions, Google's Interactions API, and its decoding.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. The body is read as
those of Google's other calls are (`gateway.dialects.gemini.request`), but names are in snake case
alone. The input is a text, a content, a step, or a list of contents or steps. Unknown fields inside
steps and tools are left out, and the answer names them.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Raw

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects import fields
from gateway.dialects.bodies import check_schema, check_values, read
from gateway.dialects.fields import Fields, Style, rules_of, undone_of
from gateway.dialects.gemini import request as gemini
from gateway.dialects.gemini.lower import json_schema
from gateway.dialects.unknown import UNKNOWN
from gateway.prompt.ignored import Notepad

CONTENTS = ("text", "image", "audio", "video", "document")
"""The types of contents. A content in a step's place is the user's."""


class Content(gemini.Inner, rename="lower"):
    """A text, or a file by its base64 `data` or its `uri`."""

    type: str = ""
    text: str = ""
    data: str = ""
    mime_type: str = ""
    uri: str = ""
    name: fields.Name = ""
    annotations: Any = None
    resolution: Any = None
    processing: Any = None
    channels: Any = None
    sample_rate: Any = None


class Step(Content, rename="lower"):
    """One step of a conversation, or a content of the user's. `result` is a text, an object, or a
    list of contents. A thought's text is in its `summary`."""

    content: Annotated[list[Content], fields.blocks] = msgspec.field(default_factory=list)
    id: fields.Name = ""
    arguments: fields.CallInput = msgspec.field(default_factory=dict)
    call_id: fields.Name = ""
    result: Any = None
    is_error: bool = False
    signature: Any = None
    summary: Annotated[list[Content], fields.blocks] = msgspec.field(default_factory=list)
    error: Any = None


class Steps(gemini.Shape, rename="lower"):
    input: Annotated[list[Step], fields.content] = msgspec.field(default_factory=list)


class Tool(gemini.Inner, rename="lower"):
    """A function, or a tool that Google would run itself. The latter is left out."""

    type: str = ""
    name: fields.Name = ""
    description: str | None = None
    short_description: Any = None
    parameters: fields.Schema | None = None
    defer_loading: bool = False


class AllowedTools(gemini.Shape, rename="lower"):
    mode: str = "auto"
    tools: Annotated[list[str], fields.named_tools] | None = None


class ToolChoice(gemini.Shape, rename="lower"):
    """Which tools may be called. A request may have the mode alone in its place."""

    allowed_tools: AllowedTools = msgspec.field(default_factory=AllowedTools)


class GenerationConfig(gemini.Shape, rename="lower"):
    """The settings of generation. `FIELDS` says which of them are ignored."""

    max_output_tokens: fields.Count | None = None
    seed: fields.Seed | None = None
    stop_sequences: Annotated[list[str], fields.stops] = msgspec.field(default_factory=list)
    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    thinking_level: str | None = None
    thinking_summaries: str = "none"
    tool_choice: ToolChoice | None = None
    image_config: Any = None
    speech_config: Any = None
    transcription_config: Any = None
    video_config: Any = None


class InteractionRequest(Steps, rename="lower"):
    """The body of one request. `service_tier` changes nothing here. Only the `name` of `labels` is
    kept."""

    model: fields.Name = ""
    system_instruction: str = ""
    tools: Annotated[list[Tool], fields.tools] = msgspec.field(default_factory=list)
    generation_config: GenerationConfig = msgspec.field(default_factory=GenerationConfig)
    previous_interaction_id: fields.Name | None = None
    cached_content: str = ""
    cache_salt: fields.Salt | None = None
    response_format: Any = None
    response_mime_type: str = ""
    response_modalities: list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    store: bool = True
    background: bool = False
    labels: Annotated[Any, fields.metadata] = None
    safety_settings: list[Any] = msgspec.field(default_factory=list)
    service_tier: Any = None
    agent: Any = None
    agent_config: Any = None
    continuation_token: Any = None
    environment: Any = None
    webhook_config: Any = None


REFUSED = {
    "agent": "this server runs no agents: name a `model`",
    "agent_config": "this server runs no agents",
    "background": "this server answers at once",
    "continuation_token": "no answer here is continued by a token",
    "environment": "this server runs no agents",
    "webhook_config": "this server calls no webhooks",
}
"""Fields that are refused, with the reason. Without them the answer, or how it comes, would be
another one."""
_NOT_DONE = ("image_config", "speech_config", "transcription_config", "video_config")
FIELDS = Fields(
    style=Style("input: more than {} steps and contents"),
    rules=rules_of(InteractionRequest),
    undone=undone_of(
        {
            **{f"generation_config.{name}": ("not done by this server",) for name in _NOT_DONE},
            "safety_settings": ("this server filters nothing", []),
        }
    ),
)
_encode = msgspec.json.Encoder().encode


class Decoded(NamedTuple):
    """A decoded body."""

    request: InteractionRequest
    # The input as it came.
    input: Any
    # The JSON schema of the answer's text; None without one.
    output_schema: dict[str, Any] | None
    # The paths of unknown fields.
    left_out: Sequence[str]
    # How many of the first steps are from stored interactions.
    num_earlier: int = 0
    # How many interactions before it are no longer stored.
    num_lost: int = 0

    @property
    def model(self) -> str:
        return self.request.model

    def steps(self) -> Iterator[tuple[str, Step]]:
        """The steps, each with its path."""
        for index, step in enumerate(self.request.input, -self.num_earlier):
            if index < 0:
                yield f"previous[{index + self.num_earlier}]", step
            else:
                yield f"input[{index}]" if isinstance(self.input, list) else "input", step

    def behind(self, earlier: Sequence[Raw], num_lost: int, bounds: RequestBounds) -> "Decoded":
        """The request with the `earlier` steps, which were stored, in front of its own. Raise
        InvalidRequest or TooLarge as for a body that has all of them."""
        body = b'{"input":[%b]}' % b",".join(earlier)
        kept, _ = gemini.decode(body, Steps, bounds)
        whole = msgspec.structs.replace(self.request, input=[*kept.input, *self.request.input])
        FIELDS.check(whole, bounds)
        return self._replace(request=whole, num_earlier=len(kept.input), num_lost=num_lost)


def decode_interaction(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> Decoded:
    """Decode a body. Raise InvalidRequest, or TooLarge for one beyond the bounds."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)

    def typed() -> tuple[Any, InteractionRequest, list[str]]:
        value = msgspec.json.decode(body)
        raw_input = value.get("input") if isinstance(value, dict) else None
        request, left_out = gemini.typed(_in_full(value), InteractionRequest)
        return raw_input, request, left_out

    raw_input, request, left_out = read(typed, gemini.explained)
    request.model = request.model.removeprefix("models/")
    FIELDS.check(request, bounds)
    for name, reason in REFUSED.items():
        if getattr(request, name) not in (None, False):
            raise InvalidRequest(f"{name}: not supported: {reason}", name)
    if not request.model:
        raise InvalidRequest("model: is required")
    if any(modality.lower() != "text" for modality in request.response_modalities):
        raise InvalidRequest("response_modalities: only text is supported")
    return Decoded(request, raw_input, _schema_of(request, bounds), left_out)


def _in_full(value: Any) -> Any:
    """The body with its short forms written out: an input of one text, and a mode in the place of
    a tool choice."""
    if not isinstance(value, dict):
        return value
    whole = dict(value)
    if isinstance(whole.get("input"), str):
        whole["input"] = {"type": "text", "text": whole["input"]}
    config = whole.get("generation_config")
    if isinstance(config, dict) and isinstance(config.get("tool_choice"), str):
        choice = {"allowed_tools": {"mode": config["tool_choice"]}}
        whole["generation_config"] = {**config, "tool_choice": choice}
    return whole


def contents_in(result: Any, path: str, notepad: Notepad) -> list[Content] | None:
    """The contents of a function's result that is a list of contents; None for other JSON."""
    if not isinstance(result, list):
        return None
    if not all(isinstance(item, dict) and item.get("type") in CONTENTS for item in result):
        return None
    step, unknown = read(lambda: gemini.typed({"content": result}, Step), gemini.explained)
    for place in unknown:
        notepad.ignore(f"{path}{place.removeprefix('content')}", UNKNOWN)
    return step.content


def _schema_of(request: InteractionRequest, bounds: RequestBounds) -> dict[str, Any] | None:
    """The JSON schema that binds the answer's text; None without one.

    `response_format` is a format of text, a list of one, or a schema by itself.
    """
    path = "response_format"
    value = request.response_format
    if isinstance(value, list):
        if len(value) > 1:
            raise InvalidRequest(f"{path}: may have one format, that of the text")
        value = value[0] if value else None
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object")
    mime_type = request.response_mime_type
    schema = value
    if value is not None and value.get("type") in ("image", "audio", "video"):
        raise InvalidRequest(f"{path}.type: only text is supported")
    if value is not None and value.get("type") == "text":
        mime_type = value.get("mime_type") or mime_type
        schema = value.get("schema")
        path = f"{path}.schema"
        unknown = value.keys() - {"type", "mime_type", "schema"}
        if unknown:
            raise InvalidRequest(f"response_format.{min(unknown)[:64]}: unknown field")
    if mime_type not in ("", "text/plain", "application/json"):
        raise InvalidRequest(
            "response_format.mime_type: only text/plain and application/json are supported"
        )
    if schema is None:
        return {"type": ["object", "array"]} if mime_type == "application/json" else None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path}: must be an object")
    if mime_type == "text/plain":
        raise InvalidRequest(f"{path}: needs the mime_type application/json")
    check_schema(schema, path, bounds)
    return json_schema(schema, path)


def kept_steps(value: Any) -> list[Raw]:
    """The steps of an input as they are kept. Consecutive contents outside of steps become one step
    of the user."""
    items = [{"type": "text", "text": value}] if isinstance(value, str) else value
    steps: list[dict[str, Any]] = []
    is_open = False
    for item in items if isinstance(items, list) else [items]:
        is_content = item.get("type") in CONTENTS
        if is_content and is_open:
            steps[-1]["content"].append(item)
        else:
            steps.append({"type": "user_input", "content": [item]} if is_content else item)
        is_open = is_content
    return [Raw(_encode(step)) for step in steps]
