"""From a request of Google's API to an Ask, with the checks that need no engine."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.protocol import Breakpoint, Sampling, ToolChoice, Ttl
from gateway.base.catalogue import Model
from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini.lower import json_schema, lay_out
from gateway.dialects.gemini.request import ENUM_TYPE, GenerateRequest, GenerationConfig, Prompted
from gateway.prompt.ask import Ask, Principal
from gateway.prompt.ignored import CANNOT_THINK, Notepad
from gateway.prompt.media import Unreadable
from gateway.prompt.origin import name_of
from gateway.prompt.plan import make_plan

_TEXT_TYPES = ("", "text/plain")
_JSON_TYPE = "application/json"
# Of the generation's fields: what asks for better and is not done here.
_UNDONE = (
    "media_resolution",
    "speech_config",
    "image_config",
    "audio_timestamp",
    "audio_transcription_config",
    "enable_affective_dialog",
    "enable_enhanced_civic_answers",
    "routing_config",
    "model_config",
    "model_selection_config",
    "translation_config",
)
# What would change the answer, and no engine here can: refused unless it is neutral.
_REFUSED: dict[str, Any] = {
    "response_format": None,
    "continuation_token": None,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks for what, and when; `unreadable` is the setting."""

    principal: Principal
    model: Model
    arrived: float
    unreadable: Unreadable


@dataclass(frozen=True, slots=True)
class Held:
    """A cached content behind which a request stands: it lives `seconds` more."""

    prompted: Prompted
    ttl: Ttl
    seconds: float


def ask_of(
    request: GenerateRequest,
    asked: Asked,
    *,
    stream: bool,
    held: Held | None = None,
) -> Ask:
    """Without a cached content the key's policy marks the prompt."""
    notepad = Notepad()
    config = request.generation_config
    _check_conversation(request)
    _check_generation(config, notepad)
    if request.safety_settings:
        notepad.ignore("safetySettings", "this server filters nothing")
    choice = _tool_choice(request, held, notepad)
    thinking = _thinks(config, notepad)
    layout = lay_out(
        request,
        asked.unreadable,
        notepad,
        None if held is None else held.prompted,
        None if held is None else held.ttl,
    )
    policy = asked.principal.auto_cache if held is None else None
    plan = make_plan(layout, None, asked.principal.scope, policy, asked.principal.plan_memory)
    if held is not None:
        points = [Breakpoint(p.segment, p.ttl, held.seconds) for p in plan.breakpoints]
        plan = msgspec.structs.replace(plan, breakpoints=points)
    return Ask(
        dialect="gemini",
        principal=asked.principal,
        model=asked.model,
        plan=plan,
        sampling=_sampling(config),
        tool_choice=choice,
        output_schema=_output_schema(config),
        thinking=thinking,
        omit_thinking=not (config.thinking_config and config.thinking_config.include_thoughts),
        stream=stream,
        arrived=asked.arrived,
        notes=notepad.notes(),
        name=name_of(request.labels),
    )


def _sampling(config: GenerationConfig) -> Sampling:
    if not all(config.stop_sequences):
        raise InvalidRequest("generationConfig.stopSequences: must not contain an empty string")
    if config.max_output_tokens == 0 and config.candidate_count > 1:
        raise InvalidRequest("generationConfig.candidateCount: must be 1 without output tokens")
    if config.logprobs and not config.response_logprobs:
        raise InvalidRequest("generationConfig.logprobs: only allowed with responseLogprobs")
    return Sampling(
        max_tokens=config.max_output_tokens,
        # A `topP` of 0 leaves only the most likely token, like a temperature of 0.
        temperature=0.0 if config.top_p == 0 else config.temperature,
        top_p=config.top_p or None,
        top_k=config.top_k,
        stop_sequences=config.stop_sequences,
        seed=config.seed,
        num_choices=config.candidate_count,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logprobs=config.logprobs or 0 if config.response_logprobs else None,
    )


def _check_conversation(request: GenerateRequest) -> None:
    if not request.contents:
        raise InvalidRequest("contents: contents are required")
    if request.contents[-1].role == "model":
        raise InvalidRequest("contents: the last content must be of role 'user'")
    if request.cached_content is not None:
        for name in ("system_instruction", "tools", "tool_config"):
            if getattr(request, name):
                raise InvalidRequest(
                    "cachedContent: excludes systemInstruction, tools and toolConfig: they belong"
                    " to the cached content"
                )


def _check_generation(config: GenerationConfig, notepad: Notepad) -> None:
    for name in _UNDONE:
        if getattr(config, name) is not None:
            notepad.ignore(f"generationConfig.{_camel(name)}", "not done by this server")
    for name, neutral in _REFUSED.items():
        if getattr(config, name) != neutral:
            raise InvalidRequest(
                f"generationConfig.{_camel(name)}: this value is not supported by this server"
            )
    if any(modality.upper() != "TEXT" for modality in config.response_modalities):
        raise InvalidRequest("generationConfig.responseModalities: only TEXT is supported")


def _thinks(config: GenerationConfig, notepad: Notepad) -> bool:
    """A budget of 0 is the wish not to think; any other setting is a wish to."""
    wanted = config.thinking_config
    if wanted is None or wanted.thinking_budget == 0:
        return False
    path = "generationConfig.thinkingConfig"
    asks = wanted.include_thoughts or wanted.thinking_budget is not None or wanted.thinking_level
    if not asks:
        return False
    notepad.wish(path, CANNOT_THINK, "thinking")
    if wanted.thinking_budget is not None and wanted.thinking_budget > 0:
        notepad.ignore(f"{path}.thinkingBudget", "thinking has no budget of its own")
    return True


def _output_schema(config: GenerationConfig) -> dict[str, Any] | None:
    path, given = "generationConfig.responseSchema", config.response_schema
    if config.response_json_schema is not None:
        if given is not None:
            raise InvalidRequest(f"{path}: excludes responseJsonSchema")
        path = "generationConfig.responseJsonSchema"
    if config.response_mime_type in _TEXT_TYPES:
        if given is not None or config.response_json_schema is not None:
            raise InvalidRequest(f"{path}: needs the responseMimeType {_JSON_TYPE}")
        return None
    if config.response_mime_type not in (_JSON_TYPE, ENUM_TYPE):
        raise InvalidRequest(
            f"generationConfig.responseMimeType: only text/plain, {_JSON_TYPE} and {ENUM_TYPE}"
            " are supported"
        )
    if given is None and config.response_json_schema is None and not config.is_enum:
        return {"type": ["object", "array"]}
    schema = config.response_json_schema if given is None else json_schema(given, path)
    if config.is_enum:
        _check_enum(config, schema, path)
    return schema


def _check_enum(config: GenerationConfig, schema: dict[str, Any] | None, path: str) -> None:
    words = schema.get("enum") if schema else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidRequest(f"{path}: {ENUM_TYPE} needs a schema of strings in an `enum`")
    if config.response_logprobs:
        raise InvalidRequest(f"generationConfig.responseLogprobs: not supported with {ENUM_TYPE}")


def _tool_choice(request: GenerateRequest, held: Held | None, notepad: Notepad) -> ToolChoice:
    given = held.prompted if held is not None else request
    path = "toolConfig.functionCallingConfig"
    config = given.tool_config.function_calling_config if given.tool_config else None
    if config is None:
        return ToolChoice()
    names = {each.name for tool in given.tools for each in tool.function_declarations}
    for name in config.allowed_function_names:
        if name not in names:
            raise InvalidRequest(f"{path}.allowedFunctionNames: there is no function '{name[:64]}'")
    if config.stream_function_call_arguments:
        notepad.ignore(f"{path}.streamFunctionCallArguments", "calls come whole")
    match config.mode.upper():
        case "NONE":
            return ToolChoice("none")
        case "ANY":
            if not names:
                raise InvalidRequest(f"{path}.mode: ANY needs functions to choose from")
            return _forced(config.allowed_function_names, names)
        case "AUTO" | "MODE_UNSPECIFIED" | "" | "VALIDATED":
            if config.mode.upper() == "VALIDATED":
                notepad.ignore(f"{path}.mode", "free calls are not held to their schemas")
            if config.allowed_function_names:
                notepad.ignore(f"{path}.allowedFunctionNames", "only mode ANY chooses functions")
            return ToolChoice()
        case _:
            raise InvalidRequest(f"{path}.mode: must be AUTO, ANY, NONE or VALIDATED")


def _forced(allowed: list[str], names: set[str]) -> ToolChoice:
    chosen = list(dict.fromkeys(allowed))
    if len(chosen) == 1:
        return ToolChoice("tool", chosen[0])
    return ToolChoice("any", names=[] if set(chosen) == names else chosen)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
