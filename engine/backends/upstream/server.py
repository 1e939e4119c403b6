"""A model server as we see it: facts found at the start, orders, and pieces of its answers."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from engine.backends.upstream.deltas import ChatPiece
from engine.cache.ids import TokenId
from engine.protocol import Capability, ErrorCode, FinishReason, GenerateRequest
from engine.refusal import StartRefused
from engine.schedule.runner import SampleParams
from engine.supervisor import Expected

Kind = Literal["vllm", "sglang", "llamacpp", "trtllm", "tgi", "openai"]
Isolation = Literal["salt", "slots", "none"]
Tells = Literal["with_tokens", "at_the_end", "never"]
"""When a server says how many of a prompt's tokens it reused."""


class UpstreamError(Expected):
    """A server's answer that can't be used. The message is for operators and quotes no prompt."""

    code: ClassVar[ErrorCode] = "internal"


class UpstreamBusy(UpstreamError):
    """The server has no room for this request now."""

    code: ClassVar[ErrorCode] = "overloaded"


class UpstreamUnsupported(UpstreamError):
    """The server's API has no place for what the request asks."""

    code: ClassVar[ErrorCode] = "unsupported"


class UpstreamGone(UpstreamError):
    """The server can't be reached, or a connection to it broke."""

    code: ClassVar[ErrorCode] = "not_ready"


class UpstreamDenied(UpstreamError):
    """The server wants a key, or another one."""


class UpstreamRefused(StartRefused):
    """This server can't be used at all; the message says why and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a running server. `block_size` and `num_blocks` None: it does not tell.

    `is_chat`: it takes conversations and answers deltas, not tokens.
    `max_running` requests are sent to it at a time. `fingerprint` changes when it was started anew,
    as far as it shows that. `tells_note`, `isolation_note` and `forced_note` are for people.
    """

    kind: Kind
    model: str
    version: str
    max_context_tokens: int
    max_running: int
    tells: Tells
    tells_note: str
    isolation: Isolation
    isolation_note: str
    block_size: int | None = None
    num_blocks: int | None = None
    fingerprint: str = ""
    capabilities: frozenset[Capability] = frozenset()
    takes_grammars: bool = True
    is_chat: bool = False
    forced_note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one choice asks of a server. `max_tokens` is at least 1.

    `end_token_ids` end it, and nothing else does. `grammar` is in llguidance's form of Lark.
    `is_seeded`: the client asked for draws that can be repeated. `slot` is one of llama.cpp's, and
    `may_reuse` says whether what is in it may be reused.
    """

    order_id: str
    scope: str
    token_ids: Sequence[TokenId]
    request: GenerateRequest
    sample: SampleParams
    is_seeded: bool
    max_tokens: int
    end_token_ids: Sequence[TokenId]
    grammar: str | None = None
    slot: int = 0
    may_reuse: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came since the last one. `cached_tokens` None: not told with this piece.

    `finish`: why the server ended it, where our parser sees no end. `chat` is what came of a server
    of conversations, and `sampled_tokens` how many tokens its whole answer had.
    """

    token_ids: Sequence[TokenId] = ()
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    is_last: bool = False
    finish: FinishReason | None = None
    chat: ChatPiece | None = None
    sampled_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeTexts:
    """What a server's tokenizer is compared with: texts, and our tokens of each."""

    tokens: dict[str, list[TokenId]] = field(default_factory=dict)


class Server(Protocol):
    """One model server, by the API of its kind. All methods are called on one event loop.

    Each raises UpstreamError, or UpstreamGone where the server can't be reached.
    """

    async def find_facts(self, probe: ProbeTexts) -> Facts:
        """Look at the server once. Raises UpstreamRefused where it can't be used."""
        ...

    async def fingerprint(self) -> str:
        """Raises UpstreamGone where it does not answer."""
        ...

    async def prefill(self, order: Order) -> Piece:
        """Compute the prompt alone, for servers that tell what they reused at the end only."""
        ...

    def generate(self, order: Order) -> AsyncGenerator[Piece, None]:
        """Run a choice to its end; closing the iterator ends it at the server too."""
        ...

    async def close(self) -> None: ...
