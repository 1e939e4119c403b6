"""Fields of the Messages API that this server does not serve.

What only asks for better, or runs on the vendor's servers, is left out and noted. What would make
the answer another one is refused by its name.
"""

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET

from gateway.base.errors import InvalidRequest, ThreadNotFound
from gateway.dialects.anthropic.request import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingEnabled,
    ThreadContinue,
    ThreadCreate,
)
from gateway.prompt.ignored import Notepad

_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_NO_EFFORT = "this model has one effort"
_DISPLAYS = (None, "summarized", "omitted")
_NOT_HERE = "not supported by this server"


def check_features(request: CountTokensRequest) -> None:
    """Raise InvalidRequest for the first field that would make the answer another one."""
    if request.compaction not in _EMPTY:
        raise InvalidRequest(f"compaction: {_NOT_HERE}")
    if isinstance(request, MessagesRequest) and isinstance(request.thread, ThreadContinue):
        raise ThreadNotFound
    for index, message in enumerate(request.messages):
        if message.role != "system":
            if message.content is UNSET:
                raise InvalidRequest(f"messages.{index}.content: Field required")
            for field in ("clear_at", "output_config"):
                if getattr(message, field) is not None:
                    raise InvalidRequest(
                        f"messages.{index}.{field}: only permitted on messages of role 'system'"
                    )
    edits = request.context_management.edits if request.context_management else None
    for index, edit in enumerate(edits or []):
        if not isinstance(edit.get("type"), str):
            raise InvalidRequest(
                f"context_management.edits.{index}: Unable to extract tag using discriminator"
                " 'type'"
            )


def note_features(request: CountTokensRequest, notepad: Notepad) -> None:
    """Note each field that asks for what is not done."""
    for path, reason in _ignored(request):
        notepad.ignore(path, reason)


def _ignored(request: CountTokensRequest) -> Iterator[tuple[str, str]]:
    fields: dict[str, Any] = {
        "billing_policy": request.billing_policy,
        "mcp_servers": request.mcp_servers,
    }
    if isinstance(request, MessagesRequest):
        fields |= {
            "container": request.container,
            "fallbacks": request.fallbacks,
            "fallback_credit_token": request.fallback_credit_token,
        }
        if isinstance(request.thread, ThreadCreate):
            yield "thread", "no thread is kept: send the whole conversation each time"
    if request.speed == "fast":
        yield "speed", "there is one speed"
    if request.output_config is not None:
        fields["output_config.task_budget"] = request.output_config.task_budget
        if request.output_config.effort is not None:
            yield "output_config.effort", _NO_EFFORT
    for path, value in fields.items():
        if value not in _EMPTY:
            yield path, _NOT_HERE
    yield from _of_thinking(request)
    yield from _of_messages(request)
    edits = request.context_management.edits if request.context_management else None
    for index, edit in enumerate(edits or []):
        if edit.get("keep") not in ("all", {"type": "all"}):
            kind = str(edit["type"])[:64]
            yield (
                f"context_management.edits.{index}",
                f"{kind}: the context stays whole",
            )


def _of_thinking(request: CountTokensRequest) -> Iterator[tuple[str, str]]:
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled | ThinkingAdaptive):
        if thinking.display not in _DISPLAYS:
            yield "thinking.display", "thinking is shown as the model writes it"
    if isinstance(thinking, ThinkingEnabled):
        yield "thinking.budget_tokens", "`max_tokens` alone bounds thinking"


def _of_messages(request: CountTokensRequest) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(request.messages):
        if message.clear_at == "next_user_message":
            yield f"messages.{index}.clear_at", "the message stays"
        if message.output_config is not None and message.output_config.effort is not None:
            yield f"messages.{index}.output_config.effort", _NO_EFFORT
