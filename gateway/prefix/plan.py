"""The plan of a request: its prompt, breakpoints and names, and the rules that need all of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.protocol import Breakpoint, Name, Prompt, ToolResultPart, ToolUsePart
from engine.protocol import Message as PromptMessage
from gateway.errors import InvalidRequest
from gateway.prefix.breakpoints import find_breakpoints, leave_out
from gateway.prefix.names import Prefix, find_prefixes, trim_names
from gateway.prefix.segments import Slot, lay_out
from gateway.wire.anthropic.request import CountTokensRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`slots` are the prompt's segments, `names` a bounded choice of its `prefixes`."""

    prompt: Prompt
    slots: list[Slot]
    breakpoints: list[Breakpoint]
    names: list[Name]
    prefixes: list[Prefix]

    def marked_prefixes(self) -> Iterator[str]:
        """Digests of the prefixes at which a breakpoint may find an entry, deepest first."""
        deepest = max((point.segment for point in self.breakpoints), default=-1)
        for name in reversed(self.names):
            if name.characters is None and name.segment <= deepest:
                yield name.digest


def make_plan(request: CountTokensRequest, scope: str) -> Plan:
    """Raise InvalidRequest for content that no engine could be sent."""
    if not request.messages:
        raise InvalidRequest("messages: at least one message is required")
    layout = lay_out(request)
    automatic = request.cache_control.ttl if request.cache_control else None
    slots, breakpoints = leave_out(layout.slots, find_breakpoints(layout.slots, automatic))
    _check_roles(layout.prompt.messages)
    _check_tool_results(layout.prompt.messages)
    marked = {breakpoint_.segment for breakpoint_ in breakpoints}
    prefixes = find_prefixes(layout.prompt, scope)
    names = trim_names([prefix.name for prefix in prefixes], marked)
    return Plan(
        prompt=layout.prompt, slots=slots, breakpoints=breakpoints, names=names, prefixes=prefixes
    )


def _check_roles(messages: list[PromptMessage]) -> None:
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
            "This model does not support assistant message prefill. The conversation must end with"
            " a user message."
        )


def _check_tool_results(messages: list[PromptMessage]) -> None:
    """Each tool call is answered in the next turn, and nothing else is; counted in merged turns."""
    pending: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        answered = [p.tool_use_id for p in message.parts if isinstance(p, ToolResultPart)]
        for position, tool_use_id in enumerate(answered):
            if tool_use_id not in pending:
                raise InvalidRequest(
                    f"messages.{index}.content.{position}: unexpected `tool_use_id` found in"
                    f" `tool_result` blocks: {tool_use_id[:64]}"
                )
        missing = [call for call in pending if call not in answered]
        if missing:
            raise InvalidRequest(
                f"messages.{index}: `tool_use` ids were found without `tool_result` blocks"
                f" immediately after: {', '.join(call[:64] for call in missing[:8])}"
            )
        pending = [p.id for p in message.parts if isinstance(p, ToolUsePart)]
