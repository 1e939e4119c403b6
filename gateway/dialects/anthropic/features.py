"""Fields of the Messages API that this server does not serve: accepted where they change nothing,
else refused by name. An option that is silently ignored would be a wrong answer.
"""

from collections.abc import Iterator
from typing import Any

from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.content import Thinking
from gateway.dialects.anthropic.request import CountTokensRequest, MessagesRequest

_CLEAR_THINKING = "clear_thinking_20251015"
_EMPTY: tuple[Any, ...] = (None, [], {}, "")


def check_features(request: CountTokensRequest) -> None:
    """Raise InvalidRequest for the first field that asks for an unsupported feature."""
    fields: dict[str, Any] = {
        "billing_policy": request.billing_policy,
        "compaction": request.compaction,
        "mcp_servers": request.mcp_servers,
    }
    if isinstance(request, MessagesRequest):
        fields |= {
            "fallbacks": request.fallbacks,
            "fallback_credit_token": request.fallback_credit_token,
            "thread": request.thread,
        }
    if request.output_config is not None:
        fields["output_config.task_budget"] = request.output_config.task_budget
    fields |= dict(_message_fields(request))
    for path, value in fields.items():
        if value not in _EMPTY:
            raise InvalidRequest(f"{path}: not supported by this server")
    if request.context_management is not None:
        num_thinking = _num_thinking_turns(request)
        for index, edit in enumerate(request.context_management.edits or []):
            _check_edit(f"context_management.edits.{index}", edit, num_thinking)


def _message_fields(request: CountTokensRequest) -> Iterator[tuple[str, Any]]:
    for index, message in enumerate(request.messages):
        path = f"messages.{index}"
        if message.role != "system":
            for field in ("clear_at", "output_config"):
                if getattr(message, field) is not None:
                    raise InvalidRequest(
                        f"{path}.{field}: only permitted on messages of role 'system'"
                    )
        if message.clear_at == "next_user_message":
            yield f"{path}.clear_at", message.clear_at


def _check_edit(path: str, edit: dict[str, Any], num_thinking: int) -> None:
    """Accept the clearing of thinking if there is nothing to clear. Agents always send it."""
    kind = edit.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}: Unable to extract tag using discriminator 'type'")
    if kind != _CLEAR_THINKING:
        raise InvalidRequest(
            f"{path}: edits of type '{kind[:64]}' are not supported by this server"
        )
    unknown = sorted(edit.keys() - {"type", "keep"})
    if unknown:
        raise InvalidRequest(f"{path}.{unknown[0][:64]}: Extra inputs are not permitted")
    kept = _kept_turns(f"{path}.keep", edit.get("keep", {"type": "thinking_turns", "value": 1}))
    if kept is not None and num_thinking > kept:
        raise InvalidRequest(f"{path}: clearing thinking is not supported by this server")


def _kept_turns(path: str, keep: Any) -> int | None:
    """The number of turns that keep their thinking; None means all."""
    match keep:
        case "all" | {"type": "all"}:
            return None
        case {"type": "thinking_turns", "value": int(value)} if value > 0:
            return value
    raise InvalidRequest(f"{path}: Input should be 'all' or a number of thinking turns")


def _num_thinking_turns(request: CountTokensRequest) -> int:
    return sum(
        isinstance(message.content, list)
        and any(isinstance(block, Thinking) for block in message.content)
        for message in request.messages
    )
