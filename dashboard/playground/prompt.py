"""A prompt with breakpoints, as a request of the Messages API. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TTLS = {"No marker": None, "5 minutes": "5m", "1 hour": "1h"}
VERSION_HEADERS = {"anthropic-version": "2023-06-01"}


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of the prompt; `ttl` None has no breakpoint at its end."""

    name: str
    text: str
    ttl: str | None


def request_body(
    model: str, system: Sequence[PromptPart], question: PromptPart, max_tokens: int
) -> dict[str, Any]:
    """Parts without text are left out: the API refuses empty blocks."""
    return {
        "model": model,
        "max_tokens": max_tokens,
        "stream": True,
        "system": [_block(part) for part in system if part.text.strip()],
        "messages": [{"role": "user", "content": [_block(question)]}],
    }


def _block(part: PromptPart) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": part.text}
    if part.ttl is not None:
        block["cache_control"] = {"type": "ephemeral", "ttl": part.ttl}
    return block
