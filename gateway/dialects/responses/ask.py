"""From a Responses request to an Ask, with the checks that need no engine."""

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from engine.protocol import Sampling, ToolChoice
from gateway.base.catalogue import Model
from gateway.base.errors import InvalidRequest
from gateway.dialects.openai.lower import HELD_SHORTER, NATIVE_TTL
from gateway.dialects.responses.lower import Reading, lay_out
from gateway.dialects.responses.request import (
    LOGPROBS,
    AdditionalTools,
    AllowedTools,
    Given,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    ResponsesRequest,
)
from gateway.dialects.responses.response import MAX_ECHO_BYTES, unechoed
from gateway.dialects.responses.tools import Origin, Toolbox
from gateway.prompt.ask import Ask, Compared, Principal, guarantees_calls
from gateway.prompt.ignored import CANNOT_THINK, STRICT_REASON, Notepad
from gateway.prompt.media import Unreadable
from gateway.prompt.origin import name_of
from gateway.prompt.plan import make_plan

_REASONING = "reasoning.encrypted_content"
_PREFIX = "resp_"
_MAX_SAID = 200
KindT = TypeVar("KindT", AllowedTools, NamedTool)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An Ask with what the response says about its request.

    `origins` are the tools behind the functions of the prompt.
    """

    ask: Ask
    given: Given
    origins: dict[str, Origin]

    @property
    def seals_thoughts(self) -> bool:
        return _REASONING in self.given.request.include


def prepare(
    given: Given, principal: Principal, model: Model, arrived: float, unreadable: Unreadable
) -> Prepared:
    request, notepad = given.request, given.notepad
    toolbox = _tools(request, notepad)
    choice, schema = _demands(request, toolbox)
    options = request.prompt_cache_options
    is_implicit = options is not None and options.mode == "implicit"
    policy = principal.auto_cache if options is None else None
    num_implicit = int(is_implicit or (policy is not None and policy.mode == "conversation"))
    reading = Reading(principal.scope, unreadable, notepad)
    layout = lay_out(request, toolbox, reading, num_implicit)
    if not layout.prompt.messages:
        raise InvalidRequest("input: must have at least one message", "input")
    if layout.prompt.messages[-1].role == "assistant":
        raise InvalidRequest(
            "input: must not end with an item of the assistant, which is not continued", "input"
        )
    plan = make_plan(
        layout, NATIVE_TTL if is_implicit else None, principal.scope, policy, principal.plan_memory
    )
    _note_without_effect(request, notepad)
    for name in unechoed(given.fields):
        notepad.ignore(name, f"longer than {MAX_ECHO_BYTES} bytes: the answer does not repeat it")
    ask = Ask(
        dialect="responses",
        principal=principal,
        model=model,
        plan=plan,
        sampling=_sampling(request),
        tool_choice=choice,
        output_schema=schema,
        thinking=_thinks(request, notepad),
        omit_thinking=False,
        stream=request.stream,
        arrived=arrived,
        routing_key=request.prompt_cache_key,
        comparison=Compared(is_wanted=True, previous=_compared(request)),
        notes=notepad.notes(),
        name=name_of(request.metadata),
    )
    return Prepared(ask, given, toolbox.origins)


def _tools(request: ResponsesRequest, notepad: Notepad) -> Toolbox:
    toolbox = Toolbox(notepad)
    toolbox.add("tools", request.tools)
    if not isinstance(request.input, str):
        for index, item in enumerate(request.input):
            if isinstance(item, AdditionalTools):
                toolbox.add(f"input[{index}].tools", item.tools)
    return toolbox


def _demands(
    request: ResponsesRequest, toolbox: Toolbox
) -> tuple[ToolChoice, dict[str, Any] | None]:
    """The demands on the output. Where none is generated there are none."""
    choice, schema = _tool_choice(request, toolbox), _output_schema(request)
    if not guarantees_calls(choice, has_schema=schema is not None):
        for path, tool in zip(toolbox.paths, toolbox.functions, strict=True):
            if tool.strict:
                toolbox.notepad.wish(f"{path}.strict", STRICT_REASON, "strict_tools", tool.name)
    return (ToolChoice(), None) if request.is_prewarm else (choice, schema)


def _tool_choice(request: ResponsesRequest, toolbox: Toolbox) -> ToolChoice:
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return _allowed(_converted(choice, AllowedTools), toolbox, parallel=parallel)
        wanted = _converted(choice, NamedTool)
        found = toolbox.find(wanted.name, wanted.namespace, wanted.type)
        if wanted.type not in ("function", "custom") or not found:
            shown = (wanted.name or wanted.type)[:64]
            raise InvalidRequest(f"tool_choice: '{shown}' is not in tools", "tool_choice")
        return ToolChoice("tool", found[0], parallel=parallel)
    if choice == "required":
        if not toolbox.functions:
            raise InvalidRequest("tool_choice: 'required' is only allowed with tools")
        return ToolChoice("any", parallel=parallel)
    return ToolChoice(choice, parallel=parallel)


def _allowed(choice: AllowedTools, toolbox: Toolbox, *, parallel: bool) -> ToolChoice:
    """A forced call is held to these. For a free one the others are left out of the prompt: no
    model calls what it does not see."""
    names = {
        name for tool in choice.tools for name in toolbox.find(tool.name, tool.namespace, tool.type)
    }
    if choice.mode == "required":
        if not names:
            raise InvalidRequest("tool_choice.tools: none of them is in tools", "tool_choice")
        return ToolChoice("any", parallel=parallel, names=sorted(names))
    if names:
        toolbox.keep(names)
    return ToolChoice("auto" if names else "none", parallel=parallel)


def _converted(choice: dict[str, Any], kind: type[KindT]) -> KindT:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        said = str(error)[:_MAX_SAID].replace("`", "'")
        raise InvalidRequest(f"tool_choice: {said}", "tool_choice") from None


def _sampling(request: ResponsesRequest) -> Sampling:
    return Sampling(
        max_tokens=0 if request.is_prewarm else request.max_output_tokens,
        # A `top_p` of 0 leaves only the most likely token, like a temperature of 0.
        temperature=0.0 if request.top_p == 0 else request.temperature,
        top_p=request.top_p or None,
        logprobs=request.top_logprobs if LOGPROBS in request.include else None,
    )


def _output_schema(request: ResponsesRequest) -> dict[str, Any] | None:
    match request.text.format if request.text else None:
        case JsonObjectFormat():
            return {"type": "object"}
        case JsonSchemaFormat(schema=schema):
            return schema
        case _:
            return None


def _thinks(request: ResponsesRequest, notepad: Notepad) -> bool:
    reasoning = request.reasoning
    if reasoning is None or reasoning.effort in (None, "none"):
        return False
    notepad.wish("reasoning.effort", CANNOT_THINK, "thinking")
    return True


def _compared(request: ResponsesRequest) -> str | None:
    """The turn to compare with. A response's id is its turn's, in OpenAI's form."""
    options = request.prompt_cache_options
    if options is None or options.comparison_response_id is None:
        return None
    return f"msg_{options.comparison_response_id.removeprefix(_PREFIX)}"


def _note_without_effect(request: ResponsesRequest, notepad: Notepad) -> None:
    options, reasoning = request.prompt_cache_options, request.reasoning
    if LOGPROBS in request.include:
        notepad.wish("include", "this model tells no log probabilities", "logprobs")
    if request.store:
        notepad.ignore("store", "this server keeps no responses")
    if request.truncation == "auto":
        notepad.ignore("truncation", "this server leaves nothing out of a prompt")
    if request.text and request.text.verbosity not in (None, "medium"):
        notepad.ignore("text.verbosity", "this model knows no verbosity")
    if options is not None and options.ttl == "12h":
        notepad.ignore("prompt_cache_options.ttl", HELD_SHORTER)
    if reasoning is None:
        return
    if reasoning.context not in (None, "auto"):
        notepad.ignore("reasoning.context", "the model's template decides what it sees")
    if reasoning.mode not in (None, "standard"):
        notepad.ignore("reasoning.mode", "there is one mode")
    if reasoning.wants_summary:
        notepad.ignore("reasoning.summary", "thinking is given whole")
