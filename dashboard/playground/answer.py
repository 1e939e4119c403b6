"""The answer to the playground's request, read from its event stream. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class WrittenTokens(msgspec.Struct, frozen=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class TokenUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: WrittenTokens = WrittenTokens()
    output_tokens: int = 0


class Breakpoint(msgspec.Struct, frozen=True):
    path: str
    state: str
    tokens: int | None = None
    ttl: str | None = None
    reason: str | None = None


class Extension(msgspec.Struct, frozen=True):
    engine: str
    automatic_tokens: int = 0
    computed_tokens: int = 0
    breakpoints: list[Breakpoint] = []
    miss_reason: str | None = None


class Message(msgspec.Struct, frozen=True):
    id: str
    usage: TokenUsage
    holdfast: Extension | None = None


@dataclass(slots=True)
class PlaygroundAnswer:
    """What has come so far. `problem` is the gateway's own word for why it ended badly."""

    text: str = ""
    message: Message | None = None
    problem: str | None = None
    output_tokens: int = 0

    @property
    def usage(self) -> TokenUsage | None:
        return self.message.usage if self.message else None


def follow(lines: Iterable[str], answer: PlaygroundAnswer) -> Iterator[str]:
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
