"""From Chat Completions and Completions requests to an Ask, with the checks that need no engine."""

from collections import Counter
from itertools import islice
from typing import Any

from engine.protocol import Prompt, Sampling, ToolChoice, Ttl
from gateway.base.catalogue import Model
from gateway.base.errors import InvalidRequest
from gateway.dialects.openai.lower import NATIVE_TTL, lay_out
from gateway.dialects.openai.request import (
    COMPLETION_TOKENS,
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    ForeignTool,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ToolMessage,
)
from gateway.prompt.ask import Ask, Principal, guarantees_calls
from gateway.prompt.ignored import CANNOT_THINK, STRICT_REASON, Notepad
from gateway.prompt.layout import Layout, Slot
from gateway.prompt.media import Unreadable
from gateway.prompt.origin import name_of
from gateway.prompt.plan import Plan, make_plan

_MAX_TOKEN_DIGITS = 9


def chat_ask_of(
    request: ChatRequest,
    principal: Principal,
    model: Model,
    arrived: float,
    unreadable: Unreadable = "placeholder",
) -> Ask:
    """Without a limit the answer may take the rest of the context.

    `unreadable` says what becomes of images and the like.
    """
    notepad = Notepad()
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    elif request.max_tokens not in (None, max_tokens):
        raise InvalidRequest(
            "max_tokens: must not differ from max_completion_tokens, which replaces it"
        )
    _check_conversation(request.messages)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs", "top_logprobs")
    automatic = _automatic(request)
    policy = None if automatic or request.prompt_cache_options else principal.auto_cache
    _note_fields(request, notepad)
    layout, policy = lay_out(request, automatic, notepad, unreadable, policy)
    plan = make_plan(layout, automatic, principal.scope, policy, principal.plan_memory)
    if not plan.prompt.num_segments:
        raise InvalidRequest("messages: there must be more than a client's billing line")
    return _ask(request, principal, model, arrived, plan, max_tokens, notepad, chat=request)


def completion_ask_of(
    request: CompletionRequest, principal: Principal, model: Model, arrived: float
) -> Ask:
    prompt = Prompt([], text=_text(request.prompt))
    plan = make_plan(
        Layout(prompt, [Slot(path="prompt")]), None, principal.scope, None, principal.plan_memory
    )
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _ask(request, principal, model, arrived, plan, max_tokens, Notepad())


def _ask(
    request: GenerationRequest,
    principal: Principal,
    model: Model,
    arrived: float,
    plan: Plan,
    max_tokens: int | None,
    notepad: Notepad,
    *,
    chat: ChatRequest | None = None,
) -> Ask:
    _check_generation(request, max_tokens)
    choice, schema = _demands(chat, max_tokens, notepad) if chat else (ToolChoice(), None)
    return Ask(
        dialect="openai",
        principal=principal,
        model=model,
        plan=plan,
        sampling=Sampling(
            max_tokens=max_tokens,
            # A `top_p` of 0 leaves only the most likely token, like a temperature of 0.
            temperature=0.0 if request.top_p == 0 else request.temperature,
            top_p=request.top_p or None,
            top_k=None if request.top_k is None else max(request.top_k, 0),
            stop_sequences=[request.stop] if isinstance(request.stop, str) else request.stop,
            seed=request.seed,
            num_choices=request.n,
            ignore_eos=request.ignore_eos,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_biases(request.logit_bias),
            logprobs=chat.top_logprobs if chat and chat.logprobs else None,
        ),
        tool_choice=choice,
        output_schema=schema,
        thinking=_thinks(chat, notepad) if chat else False,
        omit_thinking=False,
        stream=request.stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        arrived=arrived,
        routing_key=request.prompt_cache_key,
        notes=notepad.notes(),
        name=name_of(request.metadata),
    )


def _text(prompt: str | list[Any]) -> str:
    if isinstance(prompt, list):
        if any(isinstance(item, int | list) for item in prompt):
            raise InvalidRequest("prompt: token ids are not supported by this server, send text")
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise InvalidRequest("prompt: must be one string, or a list of one")
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("prompt: must not be empty")
    return prompt


def _automatic(request: ChatRequest) -> Ttl | None:
    """The automatic marker's TTL. A minimum lifetime in mode `implicit` asks for one too."""
    if request.cache_control:
        return request.cache_control.ttl
    options = request.prompt_cache_options
    return NATIVE_TTL if options and options.mode == "implicit" else None


def _thinks(request: ChatRequest, notepad: Notepad) -> bool:
    """By whichever field says so, the template's own first."""
    arguments, reasoning = request.chat_template_kwargs, request.reasoning
    if arguments and (arguments.enable_thinking is not None or arguments.thinking is not None):
        path, thinks = "chat_template_kwargs", bool(arguments.enable_thinking or arguments.thinking)
    elif request.reasoning_effort is None and reasoning is not None:
        is_off = reasoning.enabled is False or reasoning.effort == "none"
        path, thinks = "reasoning", not is_off and bool(reasoning.enabled or reasoning.effort)
    else:
        path, thinks = "reasoning_effort", request.reasoning_effort not in (None, "none")
    if thinks:
        notepad.wish(path, CANNOT_THINK, "thinking")
    return thinks


def _note_fields(request: ChatRequest, notepad: Notepad) -> None:
    """Note the fields that only ask for better."""
    if request.verbosity not in (None, "medium"):
        notepad.ignore("verbosity", "this model has one verbosity")
    if request.prediction is not None:
        notepad.ignore("prediction", "nothing is predicted: it would only be faster")
    if request.store is True:
        notepad.ignore("store", "no answer is kept")
    if request.service_tier not in (None, "auto", "default"):
        notepad.ignore("service_tier", "there is one tier")
    if request.web_search_options is not None:
        notepad.ignore("web_search_options", "this server searches nothing")


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in (given or {}).items():
        if not token.isascii() or not token.isdecimal() or len(token) > _MAX_TOKEN_DIGITS:
            raise InvalidRequest("logit_bias: keys must be token ids", "logit_bias")
        biases[int(token)] = bias
    return biases


def _demands(
    request: ChatRequest, max_tokens: int | None, notepad: Notepad
) -> tuple[ToolChoice, dict[str, Any] | None]:
    """The demands on the output: a choice of tools, and a schema of the text."""
    choice, schema = _tool_choice(request, notepad), _output_schema(request)
    if not guarantees_calls(choice, has_schema=schema is not None):
        for index, tool in enumerate(request.tools):
            if tool.function.strict:
                path = f"tools[{index}].function.strict"
                notepad.wish(path, STRICT_REASON, "strict_tools", tool.function.name)
    if max_tokens == 0:
        if choice.mode in ("any", "tool"):
            raise InvalidRequest("tool_choice: no call can be forced where max_tokens is 0")
        if schema is not None:
            raise InvalidRequest("response_format: only 'text' where max_tokens is 0")
    return choice, schema


def _output_schema(request: ChatRequest) -> dict[str, Any] | None:
    match request.response_format:
        case JsonObjectFormat():
            return {"type": "object"}
        case JsonSchemaFormat(json_schema=wanted):
            schema = {"type": "object"} if wanted.schema is None else wanted.schema
            return schema
        case _:
            return None


def _tool_choice(request: ChatRequest, notepad: Notepad) -> ToolChoice:
    own = [tool for tool in request.tools if not isinstance(tool, ForeignTool)]
    names = [tool.function.name for tool in own]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools: function names must be unique")
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise InvalidRequest(f"tool_choice.function.name: '{name[:64]}' is not in tools")
        return ToolChoice("tool", name, parallel=parallel)
    if choice == "required":
        if not names and request.tools:
            notepad.ignore("tool_choice", "this server does not run the tool")
            return ToolChoice(parallel=parallel)
        if not names:
            raise InvalidRequest("tool_choice: 'required' is only allowed with tools")
        return ToolChoice("any", parallel=parallel)
    return ToolChoice(choice, parallel=parallel)


def _check_generation(request: GenerationRequest, max_tokens: int | None) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options: only allowed with stream")
    if request.min_tokens and not request.ignore_eos:
        raise InvalidRequest("min_tokens: only supported with ignore_eos")
    if max_tokens == 0 and request.n > 1:
        raise InvalidRequest("n: must be 1 where max_tokens is 0")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    if not all(stops):
        raise InvalidRequest("stop: must not contain an empty string")


def _check_conversation(messages: list[Message]) -> None:
    """Check that the messages right behind a tool call answer it, and answer no other call."""
    pending: Counter[str] = Counter()
    num_pending = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if isinstance(message, ToolMessage):
            if not pending[message.tool_call_id]:
                raise InvalidRequest(
                    f"{path}.tool_call_id: messages with role 'tool' must be a response to a"
                    " preceding message with 'tool_calls'"
                )
            pending[message.tool_call_id] -= 1
            num_pending -= 1
            continue
        if num_pending:
            _refuse_unanswered(path, pending)
        if isinstance(message, AssistantMessage):
            pending = Counter(call.id for call in message.tool_calls or [])
            num_pending = pending.total()
    if num_pending:
        _refuse_unanswered("messages", pending)


def _refuse_unanswered(path: str, pending: Counter[str]) -> None:
    missing = ", ".join(call[:64] for call in islice(pending.elements(), 8))
    raise InvalidRequest(
        f"{path}: an assistant message with 'tool_calls' must be followed by tool messages"
        f" responding to each 'tool_call_id'. Missing: {missing}"
    )
