"""The plan of a Messages request, and the rules that need the whole conversation."""

from engine.protocol import Message as PromptMessage
from engine.protocol import ToolResultPart, ToolUsePart
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.anthropic.request import CountTokensRequest
from gateway.dialects.anthropic.segments import lay_out
from gateway.prompt.ignored import Notepad
from gateway.prompt.media import Unreadable
from gateway.prompt.plan import Plan, make_plan
from gateway.prompt.plan_memory import PlanMemory


def plan_of(
    request: CountTokensRequest,
    scope: str,
    notepad: Notepad | None = None,
    unreadable: Unreadable = "placeholder",
    memory: PlanMemory | None = None,
    policy: AutoCache | None = None,
) -> Plan:
    """Raise InvalidRequest for content that can't be sent to an engine.

    `memory` has what earlier plans made of the same prefixes. `policy` is for a request in which
    nothing is marked.
    """
    layout = lay_out(request, notepad, unreadable)
    if not layout.prompt.messages:
        raise InvalidRequest("messages: at least one message is required")
    automatic = request.cache_control.ttl if request.cache_control else None
    if policy and (automatic or any(slot.num_markers for slot in layout.slots)):
        policy = None
    plan = make_plan(layout, automatic, scope, policy, memory)
    _check_roles(layout.prompt.messages)
    if plan.has_calls:
        _check_tool_results(layout.prompt.messages)
    return plan


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
    """Check that the next merged turn answers each tool call, and nothing else."""
    pending: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        answered = [p.tool_use_id for p in message.parts if isinstance(p, ToolResultPart)]
        if not (pending or answered):
            pending = [p.id for p in message.parts if isinstance(p, ToolUsePart)]
            continue
        expected, given = set(pending), set(answered)
        for position, tool_use_id in enumerate(answered):
            if tool_use_id not in expected:
                raise InvalidRequest(
                    f"messages.{index}.content.{position}: unexpected `tool_use_id` found in"
                    f" `tool_result` blocks: {tool_use_id[:64]}"
                )
        missing = [call for call in pending if call not in given]
        if missing:
            raise InvalidRequest(
                f"messages.{index}: `tool_use` ids were found without `tool_result` blocks"
                f" immediately after: {', '.join(call[:64] for call in missing[:8])}"
            )
        pending = [p.id for p in message.parts if isinstance(p, ToolUsePart)]
