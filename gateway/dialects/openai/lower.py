"""From Chat Completions and Completions requests to an Ask: prompt, slots and demands.

Tools come first, then the system and developer messages at the beginning, then everything else in
order. Later system messages stay where they are. Tool results are part of the user's turn.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from engine.protocol import (
    Part,
    Prompt,
    Sampling,
    TextPart,
    ThinkingPart,
    ToolChoice,
    ToolResultPart,
    ToolUsePart,
    Ttl,
)
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.request import CacheControl
from gateway.dialects.custom_tools import GRAMMAR_REASON, INPUT, function_of
from gateway.dialects.lowering import (
    HOSTED,
    NATIVE_LOOKBACK,
    Lowering,
    RequestContext,
    arguments_of,
    automatic_ttl,
    sampling_of,
    split_data_url,
    uncallable,
)
from gateway.dialects.openai import request as wire
from gateway.dialects.openai.older import with_tools
from gateway.prompt.ask import Ask, name_of
from gateway.prompt.media import Kind, Media
from gateway.prompt.names import salt_of
from gateway.prompt.plan import Plan, make_plan
from gateway.prompt.slots import Slot

_MAX_TOKEN_DIGITS = 9


def chat_ask_of(request: wire.ChatRequest, context: RequestContext) -> Ask:
    """The Ask of a chat request. Without a limit the answer may take the rest of the context.

    Raise InvalidRequest for content that can't be sent to an engine.
    """
    max_tokens = _chat_max_tokens(request)
    request = msgspec.structs.replace(request, messages=with_tools(request.messages))
    _check_answered(request.messages)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs")
    lowering = _ChatLowering(context)
    wire.CHAT.note(request, lowering.notepad)
    plan = _chat_plan(request, lowering)
    sampling = _sampling(request, max_tokens, request.top_logprobs if request.logprobs else None)
    choice = _tool_choice(request, lowering)
    bound = _bound(request, request.response_format)
    is_forced = choice.mode in ("any", "tool")
    if max_tokens == 0 and is_forced:
        raise InvalidRequest("tool_choice: no call can be forced where max_tokens is 0")
    if sampling.min_tokens and is_forced:
        raise InvalidRequest("min_tokens: must be 0 where a call is forced")
    is_held = is_forced or bool(choice.names) or any(tool.strict for tool in lowering.tools)
    if sampling.allowed_token_ids and is_held:
        raise InvalidRequest("allowed_token_ids: not where calls are forced, allowed or strict")
    custom_tools = {tool.name for tool in request.tools if tool.type == "custom"}
    thinks_by = _thinks_by(request)
    return _ask(lowering, request, plan, sampling, bound, choice, thinks_by, custom_tools)


def _chat_max_tokens(request: wire.ChatRequest) -> int | None:
    if request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise InvalidRequest(
            "max_tokens: must not differ from max_completion_tokens, which replaces it"
        )
    return request.max_completion_tokens


def _check_answered(messages: Sequence[wire.Message]) -> None:
    """Check that the messages right behind a tool call answer it, and answer no other call. Raise
    InvalidRequest where they do not."""
    pending: Counter[str] = Counter()
    num_pending = 0
    for index, message in enumerate([*messages, None]):
        path = "messages" if message is None else f"messages[{index}]"
        if isinstance(message, wire.ToolMessage):
            if not pending[message.tool_call_id]:
                raise InvalidRequest(
                    f"{path}.tool_call_id: messages with role 'tool' must be a response to a"
                    " preceding message with 'tool_calls'"
                )
            pending[message.tool_call_id] -= 1
            num_pending -= 1
            continue
        if num_pending:
            unanswered = ", ".join(call[:64] for call in islice(pending.elements(), 8))
            raise InvalidRequest(
                f"{path}: an assistant message with 'tool_calls' must be followed by tool messages"
                f" responding to each 'tool_call_id'. Missing: {unanswered}"
            )
        if isinstance(message, wire.AssistantMessage):
            pending = Counter(call.id for call in message.tool_calls or [])
            num_pending = pending.total()


def _chat_plan(request: wire.ChatRequest, lowering: "_ChatLowering") -> Plan:
    end_ttl: Ttl | None = None
    if request.cache_control:
        end_ttl = automatic_ttl(request.cache_control)
    lowering.lay_out(request)
    options = request.prompt_cache_options
    is_marked = end_ttl or options or any(slot.num_markers for slot in lowering.slots)
    policy = None if is_marked else lowering.context.principal.auto_cache
    is_implicit = options is not None and options.mode == "implicit" and end_ttl is None
    plan = lowering.plan(policy, end_ttl, cache_salt=request.cache_salt, adds_native=is_implicit)
    if not plan.prompt.num_segments:
        raise InvalidRequest("messages: there must be more than a client's billing line")
    return plan


def completion_ask_of(request: wire.CompletionRequest, context: RequestContext) -> Ask:
    """The Ask of a completion request. Raise InvalidRequest for a prompt other than one text."""
    prompt = request.prompt
    if isinstance(prompt, list):
        if any(isinstance(item, int | list) for item in prompt):
            raise InvalidRequest("prompt: token ids are not supported by this server, send text")
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise InvalidRequest("prompt: must be one string, or a list of one")
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("prompt: must not be empty")
    slots = [Slot(path="prompt")]
    scope = context.principal.scope
    adapter = context.model.weights
    plan = make_plan(
        Prompt([], text=prompt),
        slots,
        None,
        scope,
        adapter=adapter,
        wish=context.header_mark,
        salt=salt_of(request.cache_salt, scope),
    )
    max_tokens = wire.COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = _sampling(request, max_tokens, None)
    lowering = Lowering(context)
    wire.COMPLETIONS.note(request, lowering.notepad)
    return _ask(lowering, request, plan, sampling, _bound(request))


def _sampling(
    request: wire.GenerationRequest, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options: only allowed with stream")
    if max_tokens == 0 and request.n > 1:
        raise InvalidRequest("n: must be 1 where max_tokens is 0")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    if not all(stops):
        raise InvalidRequest("stop: must not contain an empty string")
    biases: dict[int, float] = {}
    for token, bias in (request.logit_bias or {}).items():
        if not token.isascii() or not token.isdecimal() or len(token) > _MAX_TOKEN_DIGITS:
            raise InvalidRequest("logit_bias: keys must be token ids")
        biases[int(token)] = bias
    return sampling_of(
        request,
        "openai",
        max_tokens=max_tokens,
        top_k=None if request.top_k is None else max(request.top_k, 0),
        stop_sequences=stops,
        # With `ignore_eos` and without stop tokens no token ends the turn, so none is held back.
        min_tokens=0 if request.ignore_eos and not request.stop_token_ids else request.min_tokens,
        logit_bias=biases,
        logprobs=logprobs,
    )


def _ask(
    lowering: Lowering,
    request: wire.GenerationRequest,
    plan: Plan,
    sampling: Sampling,
    bound: Mapping[str, Any],
    choice: ToolChoice | None = None,
    thinks_by: str | None = None,
    custom_tools: Collection[str] = (),
) -> Ask:
    if bound and not sampling.max_tokens and sampling.max_tokens is not None:
        raise InvalidRequest("response_format: only 'text' where max_tokens is 0")
    if bound and sampling.min_tokens:
        raise InvalidRequest("min_tokens: must be 0 where the text is bound")
    if bound and sampling.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids: not where the text is bound")
    return lowering.ask(
        "openai",
        plan,
        sampling,
        thinks_by,
        tool_choice=choice or ToolChoice(),
        **bound,
        stream=request.stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        routing_key=request.prompt_cache_key,
        name=name_of(request.metadata),
        custom_tools=frozenset(custom_tools),
    )


def _thinks_by(request: wire.ChatRequest) -> str | None:
    """The field that asks for thinking; None without one. Of several fields the first one here
    decides, and that is the template's own."""
    arguments = request.chat_template_kwargs
    reasoning = request.reasoning
    if arguments and (arguments.enable_thinking is not None or arguments.thinking is not None):
        path = "chat_template_kwargs"
        thinks = bool(arguments.enable_thinking or arguments.thinking)
    elif request.thinking is not None:
        path = "thinking"
        thinks = request.thinking.type != "disabled"
    elif request.reasoning_effort is None and reasoning is not None:
        is_off = reasoning.enabled is False or reasoning.effort == "none"
        path = "reasoning"
        thinks = not is_off and bool(reasoning.enabled or reasoning.effort)
    else:
        path = "reasoning_effort"
        thinks = request.reasoning_effort not in (None, "none")
    return path if thinks else None


def _bound(request: wire.GenerationRequest, form: wire.Format | None = None) -> dict[str, Any]:
    """The Ask's field that binds the text, with its value: a schema or a pattern. Empty where
    nothing binds it. Raise InvalidRequest for two constraints."""
    constraints: dict[str, tuple[str, Any]] = {}
    match form:
        case wire.JsonObjectFormat():
            constraints["response_format"] = "output_schema", {"type": "object"}
        case wire.JsonSchemaFormat(json_schema=wanted):
            schema = {"type": "object"} if wanted.schema is None else wanted.schema
            constraints["response_format"] = "output_schema", schema
    older = wire.StructuredOutputs(
        choice=request.guided_choice,
        json=request.guided_json,
        json_object=request.guided_json_object,
        regex=request.guided_regex,
    )
    for where, wishes in (("structured_outputs.", request.structured_outputs), ("guided_", older)):
        if wishes is None:
            continue
        if wishes.choice is not None:
            # A pattern that matches the text alone: special characters are written by their codes.
            texts = (
                "".join(
                    letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text
                )
                for text in wishes.choice
            )
            constraints[f"{where}choice"] = "output_pattern", f"({'|'.join(texts)})"
        if wishes.json is not None:
            constraints[f"{where}json"] = "output_schema", wishes.json
        if wishes.json_object:
            constraints[f"{where}json_object"] = "output_schema", {"type": "object"}
        if wishes.regex is not None:
            constraints[f"{where}regex"] = "output_pattern", wishes.regex
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        raise InvalidRequest(f"{second}: excludes {first}")
    return dict(constraints.values())


def _tool_choice(request: wire.ChatRequest, lowering: Lowering) -> ToolChoice:
    kinds = {tool.name: tool.type for tool in request.tools if not _is_foreign(tool)}
    names = [*kinds]
    if len(names) != sum(not _is_foreign(tool) for tool in request.tools):
        raise InvalidRequest("tools: function names must be unique")
    choice = request.tool_choice
    parallel = request.parallel_tool_calls
    if isinstance(choice, wire.NamedTool | wire.NamedCustom):
        kind = "function" if isinstance(choice, wire.NamedTool) else "custom"
        name = choice.name
        if kinds.get(name) != kind:
            raise InvalidRequest(f"tool_choice.{kind}.name: '{name[:64]}' is not in tools")
        return ToolChoice("tool", name, parallel=parallel)
    if isinstance(choice, wire.AllowedTools):
        listed = {(tool.name, tool.type) for tool in choice.allowed_tools.tools}
        allowed = [name for name in names if (name, kinds[name]) in listed]
        if choice.allowed_tools.mode == "auto":
            return lowering.allow("tool_choice", allowed, names, parallel=parallel)
        if not allowed:
            raise uncallable("tool_choice")
        return ToolChoice("any", parallel=parallel, names=allowed)
    if choice != "required":
        return ToolChoice(choice, parallel=parallel)
    if names:
        return ToolChoice("any", parallel=parallel)
    if not request.tools:
        raise InvalidRequest("tool_choice: 'required' is only allowed with tools")
    raise uncallable("tool_choice")


def _is_foreign(tool: wire.Tool) -> bool:
    return isinstance(tool, wire.ForeignTool)


class _ChatLowering(Lowering):
    lookback = NATIVE_LOOKBACK

    def lay_out(self, request: wire.ChatRequest) -> None:
        if isinstance(request, wire.ReducedChatRequest):
            self.leave_out(request.left_out)
        for index, tool in enumerate(request.tools):
            self._tool(f"tools[{index}]", tool)
        for index, message in enumerate(request.messages):
            path = f"messages[{index}]"
            marker = message.cache_control
            match message:
                case wire.SystemMessage(content=content):
                    is_head = not self.messages
                    self.add_told(self._texts(path, content, marker, may_be_nonce=is_head))
                case wire.UserMessage(content=content):
                    self.add("user", self._texts(path, content, marker))
                case wire.ToolMessage():
                    self.add("user", [self._tool_result(path, message)])
                case wire.AssistantMessage():
                    self.add("assistant", self._assistant(path, message))

    def _tool(self, path: str, tool: wire.Tool) -> None:
        """Add a tool to the prompt, or note that it is left out."""
        name = tool.name
        if isinstance(tool, wire.ForeignTool):
            self.notepad.ignore(path, f"{name[:64]}: {HOSTED}")
            self.mark(path, tool.cache_control, is_absent=True)
            return
        where = f"{path}.{tool.type}"
        if not name:
            raise InvalidRequest(f"{where}.name: must not be empty")
        custom = tool.custom
        function = tool.function
        if tool.type == "custom" and custom is not None:
            self.mark(path, tool.cache_control)
            about = custom.description
            if isinstance(custom.format, wire.GrammarText):
                grammar = custom.format.grammar
                self.notepad.ignore(f"{where}.format", GRAMMAR_REASON)
                self.tools.append(
                    function_of(name, about, syntax=grammar.syntax, definition=grammar.definition)
                )
            else:
                self.tools.append(function_of(name, about))
        elif function is not None:
            self.mark(path, tool.cache_control, function.cache_control)
            about = function.description
            strict = function.strict
            self.tools.append(self.tool(where, name, function.parameters, about, strict=strict))

    def _texts(
        self,
        path: str,
        content: str | Sequence[wire.Part],
        marker: CacheControl | None,
        *,
        may_be_nonce: bool = False,
    ) -> list[TextPart]:
        """The texts of a content. The message's `marker` counts as one on its last part."""
        where = f"{path}.content"
        is_first = path == "messages[0]"
        if isinstance(content, str):
            if not content and marker:
                raise InvalidRequest(f"{where}: cache_control cannot be set for empty text")
            rest = self.without_nonce(content, is_first=is_first) if may_be_nonce else content
            self.mark(f"{where}[0]" if rest is None else where, marker, is_absent=rest is None)
            return [] if rest is None else [TextPart(rest)]
        if not content:
            raise InvalidRequest(f"{where}: must not be empty")
        texts: list[TextPart] = []
        for number, part in enumerate(content):
            outer = marker if number == len(content) - 1 else None
            part_path = f"{where}[{number}]"
            native = part.prompt_cache_breakpoint
            text: str | None = self._text(part_path, part)
            if not text and (native or outer or part.cache_control):
                raise InvalidRequest(f"{part_path}: cache_control cannot be set for empty text")
            if text and may_be_nonce:
                text = self.without_nonce(text, is_first=is_first and number == 0)
            is_absent = text is None
            self.mark(part_path, outer, part.cache_control, native=native, is_absent=is_absent)
            if text is not None:
                texts.append(TextPart(text))
        return texts

    def _text(self, path: str, part: wire.Part) -> str:
        return part.text if isinstance(part, wire.Text) else self.stand_in(path, _media_of(part))

    def _assistant(self, path: str, message: wire.AssistantMessage) -> list[Part]:
        parts: list[Part] = []
        if message.audio is not None:
            self.notepad.ignore(f"{path}.audio", "not shown to this model: audio")
        thought = message.reasoning_content or message.reasoning
        if thought:
            self.mark(f"{path}.reasoning", can_carry=False)
            parts.append(ThinkingPart(thought))
        if message.function_call is not None:
            self.notepad.ignore(f"{path}.function_call", "`tool_calls` stands in its place")
        calls = message.tool_calls or []
        content = message.content
        marker = message.cache_control
        outer = None if calls else marker
        # Clients send an answer without content back as it was.
        if content in ([], None) and outer is None:
            return parts + self._calls(path, message)
        if isinstance(content, list):
            texts = [
                wire.Text(text=part.refusal) if isinstance(part, wire.Refusal) else part
                for part in content
            ]
            parts.extend(self._texts(path, texts, outer))
        elif content or not (calls or thought):
            if not isinstance(content, str):
                raise InvalidRequest(f"{path}.content: required unless there are tool_calls")
            parts.extend(self._texts(path, content, outer))
        return parts + self._calls(path, message)

    def _calls(self, path: str, message: wire.AssistantMessage) -> list[Part]:
        """The calls of a message. The message's marker counts as one on its last call."""
        calls = message.tool_calls or []
        parts: list[Part] = []
        for number, call in enumerate(calls):
            outer = message.cache_control if number == len(calls) - 1 else None
            self.mark(f"{path}.tool_calls[{number}]", call.cache_control, outer)
            target = call.custom if call.type == "custom" else call.function
            if isinstance(target, wire.CalledCustom):
                parts.append(ToolUsePart(call.id, target.name, {INPUT: target.input}))
            elif target is not None:
                parts.append(ToolUsePart(call.id, target.name, arguments_of(target.arguments)))
        return parts

    def _tool_result(self, path: str, message: wire.ToolMessage) -> ToolResultPart:
        """The result of a call. Its parts make one segment, so only the last one may be marked."""
        where = f"{path}.content"
        content = message.content
        if isinstance(content, str):
            self.mark(where, message.cache_control)
            return ToolResultPart(message.tool_call_id, content)
        for number, part in enumerate(content[:-1]):
            if part.cache_control or part.prompt_cache_breakpoint:
                raise InvalidRequest(
                    f"{where}[{number}]: only the last part of a tool message may be marked"
                )
        last = content[-1] if content else wire.Text(text="")
        native = last.prompt_cache_breakpoint
        self.mark(where, message.cache_control, last.cache_control, native=native)
        texts = [self._text(f"{where}[{number}]", part) for number, part in enumerate(content)]
        return ToolResultPart(message.tool_call_id, "\n".join(texts))


def _media_of(part: wire.MediaPart) -> Media:
    """What a placeholder says about a part."""
    match part:
        case wire.AudioPart(input_audio=sound):
            return Media("audio", sound.format)
        case wire.FilePart(file=file):
            media_type = split_data_url(file.file_data or "")[0]
            id = None if file.file_data is not None else file.file_id
            return Media("file", media_type, name=file.filename or id or "")
        case wire.ImagePart(image_url=address):
            kind: Kind = "image"
        case wire.VideoPart(video_url=address):
            kind = "video"
        case wire.AudioUrlPart(audio_url=address):
            kind = "audio"
    url = wire.Address(address) if isinstance(address, str) else address
    media_type, data = split_data_url(url.url)
    name = "" if url.url[:5].lower() == "data:" else url.url
    return Media(kind, media_type, data, name, url.detail)
