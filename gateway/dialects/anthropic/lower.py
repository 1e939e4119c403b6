"""From a Messages request to an Ask: its prompt, a slot for each segment, and what it demands.

Every tool and every content block is one segment; a string is one text block. A deferred tool
(`defer_loading`) is not in the beginning of the prompt: where a `tool_reference` or a
`tool_addition` names it, its definition is in the conversation, and no prefix is lost.
"""

from collections.abc import Sequence
from itertools import islice

import msgspec

from engine.protocol import (
    Message,
    Part,
    Sampling,
    TextPart,
    ThinkingPart,
    Tool,
    ToolChoice,
    ToolResultPart,
    ToolUsePart,
)
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.anthropic import request as wire
from gateway.dialects.bodies import check_json
from gateway.dialects.lowering import (
    HOSTED,
    MAX_NAMED,
    Lowering,
    RequestContext,
    automatic_ttl,
    definition_of,
    input_of,
    sampling_of,
    text_in,
    uncallable,
)
from gateway.prompt.ask import NOT_COMPARED, Ask, Compared, name_of
from gateway.prompt.media import Kind, Media
from gateway.prompt.plan import Plan

_SEARCH = "tool_search_tool"
_INTERLEAVED = "interleaved-thinking"
_DEFAULT_EFFORT = "high"
_ROLE_OF = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
_IN_SYSTEM = (wire.Text, wire.ToolAddition, wire.ToolRemoval)


def ask_of(
    request: wire.MessagesRequest,
    context: RequestContext,
    version: wire.Version,
    *,
    comparison: Compared = NOT_COMPARED,
    betas: str = "",
    marks_for_client: bool = False,
) -> Ask:
    """`betas` is the header as it came. `marks_for_client`: a request without markers gets those
    of the key's policy."""
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
    if isinstance(request.thinking, wire.ThinkingEnabled) and request.max_tokens:
        # Thinking between calls counts over the whole turn, so the budget may be larger.
        is_over = request.thinking.budget_tokens >= request.max_tokens
        if is_over and _INTERLEAVED not in betas:
            raise InvalidRequest("`max_tokens` must be greater than `thinking.budget_tokens`")
    if request.max_tokens == 0:
        wrong = {
            "stream": request.stream,
            "thinking.type": isinstance(request.thinking, wire.ThinkingEnabled),
            request.form_path: request.form is not None,
            "tool_choice.type": isinstance(request.tool_choice, wire.ChoiceAny | wire.ChoiceTool),
        }
        for field, is_set in wrong.items():
            if is_set:
                raise InvalidRequest(f"max_tokens: 0 cannot be combined with `{field}`")
    policy = context.principal.auto_cache if marks_for_client else None
    ask = count_ask_of(request, context, version, policy)
    thinking = request.thinking
    return msgspec.structs.replace(
        ask,
        sampling=sampling_of(request, "anthropic"),
        omit_thinking=isinstance(thinking, wire.ThinkingEnabled | wire.ThinkingAdaptive)
        and thinking.display == "omitted",
        stream=request.stream,
        comparison=comparison,
        name=None if request.metadata is None else name_of({"name": request.metadata.name}),
    )


def count_ask_of(
    request: wire.CountTokensRequest,
    context: RequestContext,
    version: wire.Version,
    policy: AutoCache | None = None,
) -> Ask:
    """The same checks as for a generation. Fields outside the prompt have their defaults."""
    if request.user_profile_id is not None:
        raise InvalidRequest("user_profile_id: user profiles are not supported")
    if request.workspace_id not in (None, context.principal.workspace):
        raise InvalidRequest("workspace_id: does not match the workspace of the API key")
    names = [tool.name for tool in request.tools if not isinstance(tool, wire.ForeignTool)]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools: Tool names must be unique")
    lowering = _MessagesLowering(context, version)
    notepad = lowering.notepad
    form = request.form
    wire.FIELDS.note(request, notepad)
    for index, message in enumerate(request.messages):
        if message.clear_at == "next_user_message":
            notepad.ignore(f"messages.{index}.clear_at", "the message stays")
        if message.output_config is not None and message.output_config.effort is not None:
            notepad.ignore(f"messages.{index}.output_config.effort", wire.NO_EFFORT)
    for index, edit in enumerate(request.edits):
        if edit.get("keep") not in ("all", {"type": "all"}):
            reason = f"{str(edit['type'])[:64]}: the context stays whole"
            notepad.ignore(f"context_management.edits.{index}", reason)
    plan = lowering.plan_of(request, policy)
    choice = _tool_choice(request)
    thinks = not isinstance(request.thinking, wire.ThinkingDisabled | None)
    other = request.output_config.format if request.output_config else None
    if request.output_format is not None and other not in (None, request.output_format):
        raise InvalidRequest("output_format: must not differ from output_config.format")
    return lowering.ask(
        "anthropic",
        plan,
        Sampling(max_tokens=0),
        "thinking" if thinks else None,
        tool_choice=choice,
        output_schema=form.schema if form else None,
    )


def plan_of(request: wire.CountTokensRequest, context: RequestContext) -> Plan:
    """The prompt alone. Raise InvalidRequest for content that can't be sent to an engine."""
    return _MessagesLowering(context, wire.VERSIONS[0]).plan_of(request)


def _tool_choice(request: wire.CountTokensRequest) -> ToolChoice:
    choice = request.tool_choice
    if choice is None:
        return ToolChoice()
    if isinstance(choice, wire.ChoiceNone):
        return ToolChoice("none")
    if not request.tools:
        raise InvalidRequest("tool_choice may only be specified while providing tools")
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, wire.ChoiceAuto):
        return ToolChoice("auto", parallel=parallel)
    names = {tool.name for tool in request.tools if not isinstance(tool, wire.ForeignTool)}
    if isinstance(choice, wire.ChoiceAny):
        if not names:
            raise uncallable("tool_choice")
        return ToolChoice("any", parallel=parallel)
    if choice.name not in names:
        if choice.name in (tool.description for tool in request.tools if tool.name not in names):
            raise uncallable("tool_choice.name")
        raise InvalidRequest(f"tool_choice.name: tool '{choice.name[:64]}' not found in tools")
    return ToolChoice("tool", choice.name, parallel=parallel)


def prompt_parameters(request: wire.CountTokensRequest, betas: str = "") -> bytes:
    """What shapes the prompt besides its content, as bytes. They are equal for equal requests: a
    default that is written out counts as left out."""
    choice = request.tool_choice
    thinking = request.thinking
    output = request.output_config
    return msgspec.json.encode(
        [
            None if choice == wire.ChoiceAuto() else choice,
            None if isinstance(thinking, wire.ThinkingDisabled) else thinking,
            (output.effort if output else None) or _DEFAULT_EFFORT,
            request.form,
            sorted({beta.strip() for beta in betas.split(",")} - {""}),
        ]
    )


def _check_turns(messages: list[Message], *, has_calls: bool) -> None:
    """Check the order of the turns' roles. Check that each turn's calls, and no others, are
    answered in the next turn."""
    if messages[0].role == "system":
        raise InvalidRequest("messages.0: role 'system' cannot come first")
    for index, message in enumerate(messages):
        if message.role != "system":
            continue
        if messages[index - 1].role != "user":
            raise InvalidRequest(f"messages.{index}: role 'system' must follow a user turn")
        if index + 1 < len(messages) and messages[index + 1].role != "assistant":
            raise InvalidRequest(
                f"messages.{index}: role 'system' must be last or followed by an assistant turn"
            )
    if messages[-1].role == "assistant":
        raise InvalidRequest(
            "This model does not support assistant message prefill. The conversation must end"
            " with a user message."
        )
    pending: list[str] = []
    for index, message in enumerate(messages if has_calls else []):
        if message.role == "system":
            continue
        answered = [part.tool_use_id for part in message.parts if isinstance(part, ToolResultPart)]
        expected = set(pending)
        ids = set(answered)
        for position, tool_use_id in enumerate(answered):
            if tool_use_id not in expected:
                raise InvalidRequest(
                    f"messages.{index}.content.{position}: unexpected `tool_use_id` found in"
                    f" `tool_result` blocks: {tool_use_id[:64]}"
                )
        missing = [call for call in pending if call not in ids]
        if missing:
            raise InvalidRequest(
                f"messages.{index}: `tool_use` ids were found without `tool_result` blocks"
                f" immediately after: {', '.join(call[:64] for call in missing[:8])}"
            )
        pending = [part.id for part in message.parts if isinstance(part, ToolUsePart)]


class _MessagesLowering(Lowering):
    """Reads the request in its order: what a reference shows depends on those before it.

    `_deferred` are the tools that nobody named yet, `_named` those that the conversation named, in
    its order.
    """

    disagreement = "must match the ttl of the marker on its last nested block"
    counts_nested = True

    def __init__(self, context: RequestContext, version: wire.Version) -> None:
        super().__init__(context)
        self._is_strict = version == "2026-10-21"
        self._names: set[str] = set()
        self._deferred: dict[str, Tool] = {}
        self._named: dict[str, Tool] = {}

    def plan_of(self, request: wire.CountTokensRequest, policy: AutoCache | None = None) -> Plan:
        """`policy` is for a request in which nothing is marked."""
        if isinstance(request, wire.ReducedMessagesRequest):
            self.leave_out(request.left_out)
        self._names = {tool.name for tool in request.tools}
        foreign = [tool.name for tool in request.tools if isinstance(tool, wire.ForeignTool)]
        tools = [tool for tool in request.tools if not isinstance(tool, wire.ForeignTool)]
        # Deferred tools wait where the conversation names them and a tool in the prompt's beginning
        # shows how to call.
        defers = not any(name.startswith(_SEARCH) for name in foreign)
        if defers and tools and all(tool.defer_loading for tool in tools):
            defers = False
            self.notepad.ignore(
                "tools", "all are deferred, and a model learns from one how to call: all are shown"
            )
        for index, tool in enumerate(request.tools):
            lowered = self._tool(f"tools.{index}", tool, defers=defers)
            self.mark(f"tools.{index}", tool.cache_control, is_absent=lowered is None)
            if lowered is not None:
                self.tools.append(lowered)
        self._add_system(request.system or [])
        self._add_messages(request.messages)
        if not self.messages:
            raise InvalidRequest("messages: at least one message is required")
        end_ttl = automatic_ttl(request.cache_control) if request.cache_control else None
        if end_ttl or any(slot.num_markers for slot in self.slots):
            policy = None
        plan = self.plan(
            policy,
            end_ttl,
            list(islice(self._named.values(), MAX_NAMED)),
            cache_salt=request.cache_salt,
        )
        _check_turns(self.messages, has_calls=plan.has_calls)
        return plan

    def _add_system(self, system: str | Sequence[wire.Text]) -> None:
        blocks = [wire.Text(text=system)] if isinstance(system, str) else system
        for index, block in enumerate(blocks):
            path = f"system.{index}"
            if not block.text and block.cache_control:
                raise InvalidRequest(f"{path}: cache_control cannot be set for empty text blocks")
            if not block.text:
                raise InvalidRequest("system: text content blocks must be non-empty")
            text = self.without_nonce(block.text, is_first=index == 0)
            self.mark(path, block.cache_control, is_absent=text is None)
            if text is not None:
                self.system.append(TextPart(text))

    def _add_messages(self, messages: Sequence[wire.Message]) -> None:
        for index, message in enumerate(messages):
            path = f"messages.{index}"
            content = message.content
            if message.only_sets_effort:
                continue
            # An answer that had no content comes back as it was.
            if content == [] and message.role == "assistant":
                continue
            if not content and not isinstance(content, str):
                raise InvalidRequest(f"{path}: all messages must have non-empty content")
            if isinstance(content, str):
                content = [wire.Text(text=content)]
            parts = [
                self._part(f"{path}.content.{position}", message.role, block)
                for position, block in enumerate(content or [])
            ]
            self.add(message.role, parts)

    def _tool(self, path: str, tool: wire.Tool, *, defers: bool) -> Tool | None:
        """The tool as the prompt begins with it; None for one that is not in its beginning."""
        if isinstance(tool, wire.ForeignTool):
            if tool.name.startswith("computer_"):
                raise InvalidRequest(f"{path}: {tool.name[:64]}: this model reads no screenshots")
            what = HOSTED
            if tool.name.startswith(_SEARCH):
                what = "this server searches no tools: deferred tools are shown from the start"
            self.notepad.ignore(path, f"{tool.name[:64]}: {what}")
            return None
        if tool.defer_loading and tool.cache_control:
            raise InvalidRequest(
                f"Tool '{tool.name[:64]}' cannot have both defer_loading=true and cache_control"
                " set. Tools with defer_loading cannot use prompt caching."
            )
        if not tool.name:
            raise InvalidRequest(f"{path}.name: String should have at least 1 character")
        if tool.input_examples:
            self.notepad.ignore(f"{path}.input_examples", "not shown to this model")
        if tool.allowed_callers != ["direct"]:
            self.notepad.ignore(f"{path}.allowed_callers", "only the model itself calls tools")
        if "direct" not in tool.allowed_callers:
            self.notepad.ignore(path, "no server tool can call it here, so it is left out")
            return None
        strict = tool.strict
        lowered = self.tool(path, tool.name, tool.input_schema, tool.description, strict=strict)
        if tool.defer_loading and defers:
            self._deferred[tool.name] = lowered
            return None
        return lowered

    def _part(self, path: str, role: str, block: wire.Block) -> Part:
        kind = str(block.__struct_config__.tag)
        expected_role = _ROLE_OF.get(kind, role)
        if expected_role != role or (role == "system" and not isinstance(block, _IN_SYSTEM)):
            where = f"`{expected_role}`" if expected_role != role else "`user` and `assistant`"
            raise InvalidRequest(f"{path}: `{kind}` blocks can only be in {where} messages")
        match block:
            case wire.Thinking(thinking=thought):
                self.mark(path, can_carry=False)
                return ThinkingPart(thought)
            case wire.RedactedThinking():
                self.mark(path, can_carry=False)
                self.notepad.ignore(path, "this model can't read another one's redacted thinking")
                return ThinkingPart("")
            case wire.ToolUse():
                if block.caller is not None and block.caller.type != "direct":
                    self.notepad.ignore(f"{path}.caller", "the model sees the call as its own")
                self.mark(path, block.cache_control)
                return ToolUsePart(block.id, block.name, input_of(block.input))
            case wire.ToolResult(content=content):
                nested = [] if isinstance(content, str) else content
                where = f"{path}.tool_result.content"
                markers = self._nested_markers(where, nested)
                if markers and isinstance(nested[-1], wire.Text) and not nested[-1].text:
                    self._check_text(f"{where}.{len(nested) - 1}", "", markers[0])
                self.mark(path, block.cache_control, *markers)
                texts = [self._text_of(f"{where}.{n}", inner) for n, inner in enumerate(nested)]
                text = content if isinstance(content, str) else "\n".join(texts)
                return ToolResultPart(block.tool_use_id, text, block.is_error)
            case wire.Text():
                self._check_text(path, block.text, block.cache_control)
                if self._is_strict and role == "user" and block.citations:
                    raise InvalidRequest(f"{path}.text.citations: must be empty in user messages")
                self.mark(path, block.cache_control)
            case wire.Document():
                if self._is_strict and role == "assistant":
                    raise InvalidRequest(f"{path}: documents cannot be in assistant messages")
                self.mark(path, block.cache_control, *self._document_markers(path, block))
            case _:
                self.mark(path, block.cache_control)
        return TextPart(self._text_of(path, block))

    def _check_text(self, path: str, text: str, marker: wire.CacheControl | None) -> None:
        if not text:
            if marker:
                message = f"{path}.text: cache_control cannot be set for empty text blocks"
                raise InvalidRequest(message)
            raise InvalidRequest("messages: text content blocks must be non-empty")
        if text.isspace():
            raise InvalidRequest("messages: text content blocks must contain non-whitespace text")

    def _nested_markers(self, path: str, blocks: Sequence[wire.Nested]) -> list[wire.CacheControl]:
        """The markers inside a block, of which the last inner one alone may have any."""
        for index, block in enumerate(blocks[:-1]):
            if block.cache_control:
                raise InvalidRequest(
                    f"{path}.{index}.cache_control: only the last block of `content` may carry"
                    " cache_control"
                )
        markers = [last.cache_control for last in blocks[-1:] if last.cache_control]
        if blocks and isinstance(blocks[-1], wire.Document):
            markers += self._document_markers(f"{path}.{len(blocks) - 1}", blocks[-1])
        return markers

    def _document_markers(self, path: str, document: wire.Document) -> list[wire.CacheControl]:
        source = document.source
        if not isinstance(source, wire.ContentSource) or isinstance(source.content, str):
            return []
        return self._nested_markers(f"{path}.document.source.content", source.content)

    def _text_of(self, path: str, block: wire.Block) -> str:
        """The text of a block that becomes one."""
        match block:
            case wire.Text():
                return block.text
            case wire.SearchResult():
                self._note_citations(f"{path}.search_result", block)
                lines = [block.title, block.source, *(text.text for text in block.content)]
                return "\n".join(line for line in lines if line)
            case wire.Document():
                self._note_citations(f"{path}.document", block)
                body = self._source_text(f"{path}.document.source", block)
                text = "\n".join(line for line in (block.title, block.context, body) if line)
                if not text.strip():
                    raise InvalidRequest(f"{path}.document.source: the document is empty")
                return text
            case wire.Image():
                return self.stand_in(path, _media("image", block.source))
            case wire.ToolReference():
                return self._name(path, block.tool_name)
            case wire.ToolAddition(tool={"type": "tool_reference", "name": str(name)}):
                return self._name(path, name)
            case wire.ToolAddition(
                tool={
                    "type": "tool_definition",
                    "definition": {"name": str(name), "input_schema": dict(schema)} as definition,
                }
            ) if definition.get("type") in (None, "custom"):
                check_json(block.tool, f"{path}.tool_addition.tool")
                about = definition.get("description")
                return self._show(Tool(name, schema, about if isinstance(about, str) else None))
            case wire.ToolRemoval(tool={"name": str(name)}):
                self._named.pop(name, None)
                self.notepad.ignore(path, "the model is told, and may still call it")
                return f"The tool {name} is not available any more."
            case wire.ToolRemoval() | wire.ToolAddition():
                self.notepad.ignore(path, HOSTED)
                return f"[{block.__struct_config__.tag}: not shown to this model]"
            case wire.Compaction(content=str(summary)) if summary.strip():
                return summary
            case _:
                kind = block.__struct_config__.tag
                if self.context.unreadable == "refuse":
                    raise InvalidRequest(
                        f"{path}: content blocks of type '{kind}' are not supported by this server"
                    )
                self.notepad.ignore(path, f"not shown to this model: {kind}")
                return f"[{kind}: not shown to this model]"

    def _note_citations(self, path: str, block: wire.SearchResult | wire.Document) -> None:
        if block.citations and block.citations.enabled:
            self.notepad.ignore(f"{path}.citations", "this model cites nothing")

    def _source_text(self, path: str, document: wire.Document) -> str:
        """A PDF, an address or a file's id has a placeholder for its text."""
        match document.source:
            case wire.TextSource(data=text) | wire.ContentSource(content=str(text)):
                return text
            case wire.ContentSource(content=blocks):
                return "\n".join(
                    self._text_of(f"{path}.content.{index}", block)
                    for index, block in enumerate(blocks)
                    if not isinstance(block, str)
                )
            case wire.Base64Source(media_type=kind, data=data) if kind.startswith("text/"):
                file_text = text_in(data)
                if file_text is None:
                    raise InvalidRequest(f"{path}.data: Input should be base64 of UTF-8")
                return file_text
            case wire.Base64Source() | wire.UrlSource() | wire.FileSource() as source:
                return self.stand_in(path, _media("document", source))

    def _name(self, path: str, name: str) -> str:
        """The text of a reference: the tool's definition where it is named for the first time."""
        tool = self._deferred.pop(name, None)
        if tool is not None:
            return self._show(tool)
        if name not in self._names:
            self.notepad.ignore(path, "there is no such tool in `tools`")
        return f"Tool: {name}"

    def _show(self, tool: Tool) -> str:
        self._named.pop(tool.name, None)
        self._named[tool.name] = tool
        return definition_of(tool)


def _media(kind: Kind, source: wire.Base64Source | wire.UrlSource | wire.FileSource) -> Media:
    match source:
        case wire.Base64Source():
            return Media(kind, source.media_type, source.data)
        case wire.UrlSource():
            return Media(kind, name=source.url)
        case wire.FileSource():
            return Media(kind, name=source.file_id)
