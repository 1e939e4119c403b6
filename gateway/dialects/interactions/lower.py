"""From a request of Google's Interactions API to an Ask, by the lowering of its other calls.

Functions come first, then the system instruction, then the steps in order. The prompt of a cached
content stands before them. Tools, instruction and settings are those of the request. An earlier
interaction that it continues adds only its steps, as in Google's API.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.protocol import Part, TextPart, ThinkingPart, ToolChoice
from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini import request as gemini
from gateway.dialects.gemini.lower import GeminiLowering, HeldContent, json_schema, tool_choice_of
from gateway.dialects.interactions.request import (
    CONTENTS,
    FIELDS,
    Content,
    Decoded,
    Step,
    Tool,
    contents_in,
)
from gateway.dialects.lowering import HOSTED, RequestContext, sampling_of, uncallable
from gateway.prompt.ask import Ask, name_of

_HOSTED_TOOLS = frozenset(
    "code_execution computer_use file_search google_maps google_search mcp_server retrieval"
    " tool_search url_context".split()
)
_HOSTED_STEPS = frozenset(
    "code_execution file_search google_maps google_search mcp_server_tool processing retrieval"
    " tool_search url_context".split()
)
_CALL_ENDS = ("_call", "_result")
NOT_STORED = "this gateway keeps no interactions, so no other can go on with this one"


class Prepared(NamedTuple):
    decoded: Decoded
    ask: Ask


def prepare(decoded: Decoded, context: RequestContext, held: HeldContent | None) -> Prepared:
    """The Ask of a request. The prompt of the cached content `held` comes first.

    Raise InvalidRequest for content that no engine takes.
    """
    request = decoded.request
    config = request.generation_config
    lowering = _InteractionLowering(context, decoded)
    notepad = lowering.notepad
    if len(request.input) == decoded.num_earlier:
        raise InvalidRequest("input: is required")
    if held is not None and (request.system_instruction or request.tools):
        raise InvalidRequest(
            "cached_content: excludes system_instruction and tools: they belong to the cached"
            " content"
        )
    if held is not None and request.cache_salt is not None:
        raise InvalidRequest("cache_salt: excludes cached_content, which was written without it")
    if not all(config.stop_sequences):
        raise InvalidRequest("generation_config.stop_sequences: must not contain an empty string")
    FIELDS.note(request, notepad)
    if request.store and not context.keeps_responses:
        notepad.ignore("store", NOT_STORED)
    if held is not None:
        lowering.add_held(held, "cached_content.")
    lowering.add_functions(request.tools)
    lowering.add_instruction(request.system_instruction)
    lowering.add_steps(decoded)
    choice = _choice_of(lowering, decoded, held)
    return Prepared(
        decoded,
        lowering.ask(
            "gemini",
            lowering.plan_behind(held, request.cache_salt),
            sampling_of(config, "gemini"),
            _thinks_by(decoded),
            tool_choice=choice,
            output_schema=decoded.output_schema,
            omit_thinking=config.thinking_summaries != "auto",
            stream=request.stream,
            name=name_of(request.labels),
        ),
    )


def _thinks_by(decoded: Decoded) -> str | None:
    """The path of the field that asks for thinking; None without one. A level asks for thinking,
    and so does a request for summaries."""
    config = decoded.request.generation_config
    if config.thinking_level:
        return "generation_config.thinking_level"
    if config.thinking_summaries == "auto":
        return "generation_config.thinking_summaries"
    return None


def _choice_of(
    lowering: "_InteractionLowering", decoded: Decoded, held: HeldContent | None
) -> ToolChoice:
    tool_choice = decoded.request.generation_config.tool_choice
    path = "generation_config.tool_choice"
    if tool_choice is None:
        return ToolChoice() if held is None else tool_choice_of(held.prompted, lowering.notepad)
    choice = tool_choice.allowed_tools
    names = {tool.name for tool in lowering.tools}
    allowed = names if choice.tools is None else set(choice.tools)
    for name in sorted(allowed - names):
        raise InvalidRequest(f"{path}.allowed_tools.tools: there is no function '{name[:64]}'")
    match choice.mode.lower():
        case "none":
            return ToolChoice("none")
        case "any":
            if not allowed:
                raise uncallable(path)
            if len(allowed) == 1:
                return ToolChoice("tool", min(allowed))
            return ToolChoice("any", names=[] if allowed == names else sorted(allowed))
        case "auto" | "validated":
            if choice.mode.lower() == "validated":
                lowering.notepad.ignore(path, "free calls are not held to their schemas")
            if choice.tools is None:
                return ToolChoice()
            return lowering.allow(f"{path}.allowed_tools", allowed, names, parallel=True)
        case _:
            raise InvalidRequest(f"{path}: the mode must be auto, any, none or validated")


class _InteractionLowering(GeminiLowering):
    turns_path = "input"

    def __init__(self, context: RequestContext, decoded: Decoded) -> None:
        super().__init__(context, decoded.left_out)
        if decoded.num_lost:
            reason = f"{decoded.num_lost} of the interactions before it are no longer kept"
            self.notepad.ignore("previous_interaction_id", reason)

    def add_functions(self, tools: Sequence[Tool]) -> None:
        for index, tool in enumerate(tools):
            path = f"tools[{index}]"
            if tool.type in _HOSTED_TOOLS:
                self.notepad.ignore(path, HOSTED)
                continue
            if tool.type != "function":
                raise InvalidRequest(f"{path}.type: must be `function`; '{tool.type[:64]}' is not")
            if not tool.name:
                raise InvalidRequest(f"{path}.name: must not be empty")
            if tool.defer_loading:
                self.notepad.ignore(f"{path}.defer_loading", "all functions are in the prompt")
            schema = tool.parameters
            if schema is not None:
                schema = json_schema(schema, f"{path}.parameters")
            self.mark(path)
            self.tools.append(self.tool(path, tool.name, schema, tool.description))

    def add_instruction(self, text: str) -> None:
        if text:
            self.mark("system_instruction")
            self.system.append(TextPart(text))

    def add_steps(self, decoded: Decoded) -> None:
        for path, step in decoded.steps():
            self._add_step(path, step)
        self.check_answered()
        if not self.messages or self.messages[-1].role != "user":
            raise InvalidRequest("input: must end with what the user says, or a function's result")

    def _add_step(self, path: str, step: Step) -> None:
        kind = step.type
        hosted = next((end for end in _CALL_ENDS if kind.endswith(end)), "")
        if kind in CONTENTS:
            self.add("user", [self._content(path, step)])
        elif kind == "user_input":
            self.add("user", self._contents(f"{path}.content", step.content))
        elif kind == "model_output":
            self._begin_answer()
            self.add("assistant", self._contents(f"{path}.content", step.content))
        elif kind == "thought":
            self._begin_answer()
            texts = [content.text for content in step.summary if content.type == "text"]
            if texts:
                self.mark(path, can_carry=False)
                self.add("assistant", [ThinkingPart("\n".join(texts))])
        elif kind == "function_call":
            self._begin_answer()
            call = gemini.FunctionCall(name=step.name, args=step.arguments, id=step.id)
            self.add("assistant", [self.call(path, path, call)])
        elif kind == "function_result":
            answer = self._function_result(path, step)
            self.add("user", [] if answer is None else [answer])
        elif hosted and kind.removesuffix(hosted) in _HOSTED_STEPS:
            self.notepad.ignore(path, HOSTED)
        else:
            note = f"; '{kind[:64]}' is none of them" if kind else ""
            raise InvalidRequest(
                f"{path}.type: must be user_input, model_output, thought, function_call,"
                f" function_result, or a content's: {', '.join(CONTENTS)}{note}"
            )

    def _begin_answer(self) -> None:
        """Check that the calls of the turn before are answered."""
        if not (self.messages and self.messages[-1].role == "assistant"):
            self.check_answered()

    def _contents(self, path: str, contents: Sequence[Content]) -> list[Part]:
        return [
            self._content(f"{path}[{number}]", content) for number, content in enumerate(contents)
        ]

    def _content(self, path: str, content: Content) -> TextPart:
        text = self._text_of(path, content)
        self.mark(path, can_carry=bool(text))
        return TextPart(text)

    def _text_of(self, path: str, content: Content) -> str:
        """The text of a content: its own, a text file's, or the placeholder of another file."""
        if content.type == "text":
            return content.text
        if content.type not in CONTENTS:
            raise InvalidRequest(f"{path}.type: must be one of {', '.join(CONTENTS)}")
        mime_type = content.mime_type
        if content.type in ("image", "audio", "video") and not mime_type:
            mime_type = f"{content.type}/"
        if content.data:
            return self.inline(path, mime_type, content.data, content.name)
        if not content.uri:
            raise InvalidRequest(f"{path}: must have `data` or `uri`")
        return self.media(path, mime_type, name=content.uri)

    def _function_result(self, path: str, step: Step) -> Part | None:
        result = step.result
        contents = contents_in(result, f"{path}.result", self.notepad)
        if contents is not None:
            texts = [
                self._text_of(f"{path}.result[{index}]", content)
                for index, content in enumerate(contents)
            ]
            result = "\n".join(texts)
        kind = "error" if step.is_error else "output"
        answer = gemini.FunctionResponse(name=step.name, id=step.call_id, response={kind: result})
        return self.result(path, path, answer)
