"""A prompt with breakpoints, as a Messages request, and what its answer says became of it. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

TTLS = {"No marker": None, "5 minutes": "5m", "1 hour": "1h"}
VERSION_HEADERS = {"anthropic-version": "2023-06-01"}
CLASSES = ("Read from cache", "Written, 5 minutes", "Written, 1 hour", "Uncached")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the prompt; `ttl` None has no breakpoint at its end."""

    name: str
    text: str
    ttl: str | None


class CacheCreation(msgspec.Struct, frozen=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation()
    output_tokens: int = 0


class Breakpoint(msgspec.Struct, frozen=True):
    path: str
    state: str
    tokens: int | None = None
    ttl: str | None = None
    reason: str | None = None


class Holdfast(msgspec.Struct, frozen=True):
    engine: str
    automatic_tokens: int = 0
    computed_tokens: int = 0
    breakpoints: list[Breakpoint] = []
    miss_reason: str | None = None


class Message(msgspec.Struct, frozen=True):
    id: str
    usage: Usage
    holdfast: Holdfast | None = None


@dataclass(slots=True)
class Answer:
    """What has come so far. `problem` is the gateway's own word for why it ended badly."""

    text: str = ""
    message: Message | None = None
    problem: str | None = None
    output_tokens: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def usage(self) -> Usage | None:
        return self.message.usage if self.message else None


def request_body(
    model: str, system: Sequence[Part], question: Part, max_tokens: int
) -> dict[str, Any]:
    """Parts without text are left out: the API refuses empty blocks."""
    return {
        "model": model,
        "max_tokens": max_tokens,
        "stream": True,
        "system": [_block(part) for part in system if part.text.strip()],
        "messages": [{"role": "user", "content": [_block(question)]}],
    }


def _block(part: Part) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": part.text}
    if part.ttl is not None:
        block["cache_control"] = {"type": "ephemeral", "ttl": part.ttl}
    return block


def follow(lines: Iterable[str], answer: Answer) -> Iterator[str]:
    """Read a stream of server-sent events into `answer`; yield each piece of text as it comes."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        event: Mapping[str, Any] = msgspec.json.decode(line.removeprefix("data:").strip())
        match event.get("type"):
            case "message_start":
                answer.message = msgspec.convert(event["message"], Message)
            case "content_block_delta" if event["delta"].get("type") == "text_delta":
                answer.text += event["delta"]["text"]
                yield event["delta"]["text"]
            case "message_delta":
                answer.output_tokens = event.get("usage", {}).get("output_tokens", 0)
            case "error":
                answer.problem = str(event.get("error", {}).get("message", "the stream broke off"))


def ribbon(usage: Usage) -> list[dict[str, Any]]:
    """The prompt from first to last token by class: read first, then what was written, then the
    rest, as a prefix cache has it."""
    creation, start, rows = usage.cache_creation, 0, []
    counts = (
        usage.cache_read_input_tokens,
        creation.ephemeral_5m_input_tokens,
        creation.ephemeral_1h_input_tokens,
        usage.input_tokens,
    )
    # Longer TTLs come first in a prompt: the contract asks for that order.
    order = (0, 2, 1, 3)
    for number in order:
        if counts[number]:
            end = start + counts[number]
            rows.append(
                {"class": CLASSES[number], "start": start, "end": end, "tokens": counts[number]}
            )
            start = end
    return rows


def pieces(parts: Sequence[Part], message: Message) -> list[dict[str, Any]]:
    """Each part of the prompt with its tokens by class.

    Ends of marked parts are the engine's own; between them parts share by their length, and are
    said to be about that long.
    """
    spans = ribbon(message.usage)
    total = spans[-1]["end"] if spans else 0
    known = _ends(parts, message, total)
    rows, start = [], 0
    for part, (end, is_exact) in zip(parts, known, strict=True):
        row: dict[str, Any] = {"part": part, "tokens": end - start, "is_exact": is_exact}
        for span in spans:
            overlap = min(end, span["end"]) - max(start, span["start"])
            if overlap > 0:
                row[span["class"]] = overlap
        rows.append(row)
        start = end
    return rows


def _ends(parts: Sequence[Part], message: Message, total: int) -> list[tuple[int, bool]]:
    marked = [bp.tokens for bp in (message.holdfast.breakpoints if message.holdfast else [])]
    exact: dict[int, int] = {}
    numbers = [number for number, part in enumerate(parts) if part.ttl is not None]
    for number, tokens in zip(numbers, marked, strict=False):
        if tokens is not None:
            exact[number] = tokens
    exact[len(parts) - 1] = total
    ends: list[tuple[int, bool]] = []
    first, start = 0, 0
    for last in sorted(exact):
        group = parts[first : last + 1]
        weight, done = max(sum(len(part.text) for part in group), 1), 0
        for part in group:
            done += len(part.text)
            end = start + round((exact[last] - start) * done / weight)
            ends.append((end, len(group) == 1))
        first, start = last + 1, exact[last]
    return ends
