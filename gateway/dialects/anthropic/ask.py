"""From a Messages request to an Ask, with the checks that need no engine."""

from typing import Any

import msgspec

from engine.protocol import Sampling, ToolChoice
from gateway.base.catalogue import Model
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.anthropic.decode import note_features
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.anthropic.request import (
    ChoiceAny,
    ChoiceAuto,
    ChoiceNone,
    ChoiceTool,
    CountTokensRequest,
    ForeignTool,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
    Version,
)
from gateway.prompt.ask import NOT_COMPARED, Ask, Compared, Principal, guarantees_calls
from gateway.prompt.ignored import CANNOT_THINK, STRICT_REASON, Notepad
from gateway.prompt.media import Unreadable
from gateway.prompt.origin import name_of
from gateway.prompt.plan import Plan

_INTERLEAVED = "interleaved-thinking"


def ask_of(
    request: MessagesRequest,
    principal: Principal,
    model: Model,
    version: Version,
    arrived: float,
    *,
    comparison: Compared = NOT_COMPARED,
    num_removed: int = 0,
    betas: str = "",
    unreadable: Unreadable = "placeholder",
    marks_for_client: bool = False,
) -> Ask:
    """`betas` is the header as it came. `unreadable` says what becomes of images and the like.

    `marks_for_client`: a request without markers gets those of the key's policy.
    """
    _check_generation(request, version, betas)
    notepad = Notepad()
    policy = principal.auto_cache if marks_for_client else None
    prepared = prepare(request, principal, version, notepad, unreadable, policy)
    thinking = request.thinking
    choice, schema = _demands(request, notepad)
    return Ask(
        principal=principal,
        model=model,
        plan=prepared,
        sampling=Sampling(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_sequences=request.stop_sequences,
        ),
        tool_choice=choice,
        output_schema=schema,
        thinking=_thinks(request, notepad),
        omit_thinking=isinstance(thinking, ThinkingEnabled | ThinkingAdaptive)
        and thinking.display == "omitted",
        stream=request.stream,
        arrived=arrived,
        comparison=comparison,
        num_removed=num_removed,
        notes=notepad.notes(),
        name=None if request.metadata is None else name_of({"name": request.metadata.name}),
    )


def count_ask_of(
    request: CountTokensRequest,
    principal: Principal,
    model: Model,
    version: Version,
    arrived: float,
    unreadable: Unreadable = "placeholder",
) -> Ask:
    """The same checks as for a generation. Fields outside the prompt have their defaults."""
    notepad = Notepad()
    plan = prepare(request, principal, version, notepad, unreadable)
    choice, schema = _demands(request, notepad)
    return Ask(
        principal=principal,
        model=model,
        plan=plan,
        sampling=Sampling(max_tokens=0),
        tool_choice=choice,
        output_schema=schema,
        thinking=_thinks(request, notepad),
        omit_thinking=False,
        stream=False,
        arrived=arrived,
    )


def prepare(
    request: CountTokensRequest,
    principal: Principal,
    version: Version,
    notepad: Notepad,
    unreadable: Unreadable,
    policy: AutoCache | None = None,
) -> Plan:
    _check_shared(request, principal)
    note_features(request, notepad)
    memory = principal.plan_memory
    plan = plan_of(request, principal.scope, notepad, unreadable, memory, policy)
    if version == "2026-10-21":
        _check_version_2026_10_21(request)
    return plan


def _thinks(request: CountTokensRequest, notepad: Notepad) -> bool:
    if request.thinking is None or isinstance(request.thinking, ThinkingDisabled):
        return False
    notepad.wish("thinking", CANNOT_THINK, "thinking")
    return True


def _demands(
    request: CountTokensRequest, notepad: Notepad
) -> tuple[ToolChoice, dict[str, Any] | None]:
    """The demands on the output: a choice of tools, and a schema of the text."""
    choice = _tool_choice(request, notepad)
    form = request.form
    if form is not None:
        other = request.output_config.format if request.output_config else None
        if request.output_format is not None and other not in (None, request.output_format):
            raise InvalidRequest("output_format: must not differ from output_config.format")
    if not guarantees_calls(choice, has_schema=form is not None):
        for index, tool in enumerate(request.tools):
            if tool.strict:
                path = f"tools.{index}.strict"
                notepad.wish(path, STRICT_REASON, "strict_tools", tool.name)
    return choice, form.schema if form else None


def _tool_choice(request: CountTokensRequest, notepad: Notepad) -> ToolChoice:
    choice = request.tool_choice
    if choice is None:
        return ToolChoice()
    if isinstance(choice, ChoiceNone):
        return ToolChoice("none")
    if not request.tools:
        raise InvalidRequest("tool_choice may only be specified while providing tools")
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, ChoiceAuto):
        return ToolChoice("auto", parallel=parallel)
    own = {tool.name for tool in request.tools if not isinstance(tool, ForeignTool)}
    if isinstance(choice, ChoiceAny):
        if own:
            return ToolChoice("any", parallel=parallel)
    elif choice.name in own:
        return ToolChoice("tool", choice.name, parallel=parallel)
    elif not any(choice.name == tool.description for tool in request.tools if tool.name not in own):
        raise InvalidRequest(f"tool_choice.name: tool '{choice.name[:64]}' not found in tools")
    notepad.ignore("tool_choice", "this server does not run the tool")
    return ToolChoice("auto", parallel=parallel)


def _check_shared(request: CountTokensRequest, principal: Principal) -> None:
    if request.user_profile_id is not None:
        raise InvalidRequest("user_profile_id: user profiles are not supported")
    if request.workspace_id not in (None, principal.workspace):
        raise InvalidRequest("workspace_id: does not match the workspace of the API key")
    names = [tool.name for tool in request.tools if not isinstance(tool, ForeignTool)]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools: Tool names must be unique")


def _check_generation(request: MessagesRequest, version: Version, betas: str) -> None:
    if version == "2026-10-21":
        for field in ("temperature", "top_p", "top_k"):
            if getattr(request, field) is not None:
                raise InvalidRequest(f"{field}: not supported with anthropic-version {version}")
    if request.inference_geo not in (None, "global"):
        raise InvalidRequest("inference_geo: Input should be 'global'")
    for index, stop in enumerate(request.stop_sequences):
        if not stop.strip():
            raise InvalidRequest(
                f"stop_sequences.{index}: each stop sequence must contain non-whitespace"
            )
    if isinstance(request.thinking, ThinkingEnabled) and request.max_tokens:
        # Thinking between calls counts over the whole turn, so the budget may be larger.
        is_over = request.thinking.budget_tokens >= request.max_tokens
        if is_over and _INTERLEAVED not in betas:
            raise InvalidRequest("`max_tokens` must be greater than `thinking.budget_tokens`")
    if request.max_tokens == 0:
        _check_prewarm(request)


def _check_prewarm(request: MessagesRequest) -> None:
    wrong = {
        "stream": request.stream,
        "thinking.type": isinstance(request.thinking, ThinkingEnabled),
        request.form_path: request.form is not None,
        "tool_choice.type": isinstance(request.tool_choice, ChoiceAny | ChoiceTool),
    }
    for field, is_set in wrong.items():
        if is_set:
            raise InvalidRequest(f"max_tokens: 0 cannot be combined with `{field}`")


def _check_version_2026_10_21(request: CountTokensRequest) -> None:
    for index, message in enumerate(request.messages):
        if not isinstance(message.content, list):
            continue
        for position, block in enumerate(message.content):
            path = f"messages.{index}.content.{position}"
            kind = block.__struct_config__.tag
            if kind == "document" and message.role == "assistant":
                raise InvalidRequest(f"{path}: documents cannot be in assistant messages")
            if kind == "text" and message.role == "user" and getattr(block, "citations", None):
                raise InvalidRequest(f"{path}.text.citations: must be empty in user messages")


_DEFAULT_EFFORT = "high"


def prompt_parameters(request: CountTokensRequest, betas: str = "") -> bytes:
    """The form is equal for equal requests: a default that is written out counts as left out."""
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config
    return msgspec.json.encode(
        [
            None if choice == ChoiceAuto() else choice,
            None if isinstance(thinking, ThinkingDisabled) else thinking,
            (output.effort if output else None) or _DEFAULT_EFFORT,
            request.form,
            sorted({beta.strip() for beta in betas.split(",")} - {""}),
        ]
    )
