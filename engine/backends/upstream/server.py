"""A model server as we see it: facts found at the start, orders, and pieces of its answers."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from engine.backends.external import Order
from engine.backends.upstream.slots import ANYWHERE, Place
from engine.backends.upstream.wire import UpstreamError, Wire
from engine.cache.ids import TokenId
from engine.protocol import Capability, FinishReason, Guarantee
from engine.refusal import StartRefused
from engine.text.files import read_json
from engine.text.renderer import ChatRenderer

Kind = Literal["vllm", "llamacpp", "openai"]
Isolation = Literal["salt", "slots", "none"]
Tells = Literal["with_tokens", "at_the_end", "never"]
"""When a server says how many of a prompt's tokens it reused."""

PROBE_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.\n\n  def f(x):\n\treturn x ** 2\n",
    "Größe, naïve, 東京, Привет, 🙂👍🏽 — “quoted” …",
)
"""What a server's tokenizer is compared with."""


class UpstreamRefused(StartRefused):
    """This server can't be used at all; the message says why and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """From the model's own files: what a server does not tell.

    `temperature` 0 is greedy. `max_context_tokens` is what the model was trained for. `probes` are
    our tokens of PROBE_TEXTS.
    """

    vocabulary_size: int
    max_context_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    probes: Mapping[str, list[TokenId]]

    @classmethod
    def of(cls, model: str, renderer: ChatRenderer) -> "ModelFacts":
        """Of a Hugging Face directory or hub id. Raises TemplateRefused for a broken file."""
        config = read_json(model, "config.json")
        sampling = read_json(model, "generation_config.json")
        text, encode = config.get("text_config"), renderer.tokenizer.encode
        inner: Mapping[str, Any] = text if isinstance(text, dict) else config
        own = renderer.tokenizer.get_vocab_size(with_added_tokens=True)
        is_greedy = sampling.get("do_sample") is False
        return cls(
            vocabulary_size=max(own, _whole(inner.get("vocab_size")) or 0),
            max_context_tokens=_whole(inner.get("max_position_embeddings")),
            temperature=0.0 if is_greedy else _number(sampling.get("temperature")),
            top_p=_number(sampling.get("top_p")),
            top_k=_whole(sampling.get("top_k")) or 0,
            probes={text: encode(text, add_special_tokens=False).ids for text in PROBE_TEXTS},
        )

    def context(self, told: int | None) -> int:
        """The server's context in tokens; where it does not tell, what the model was trained for.

        Raises UpstreamRefused where neither is known.
        """
        context = told or self.max_context_tokens
        if context is None or not 0 < context < 2**31:
            raise UpstreamRefused("neither the server nor the model's config.json tells a context")
        return context

    def check_tokens(self, tokens: Sequence[int]) -> list[TokenId]:
        """Raise UpstreamError for what is no token of the model."""
        if not all(0 <= token < self.vocabulary_size for token in tokens):
            raise UpstreamError("a token that the model does not have")
        return [TokenId(token) for token in tokens]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value >= 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a running server. `block_size` and `num_blocks` None: it does not tell.

    `is_chat`: it takes conversations and answers deltas, not tokens.
    `max_running` requests are sent to it at a time. `fingerprint` changes when it was started anew,
    as far as it shows that. `tells_note`, `isolation_note` and `forced_note` are for people.
    """

    kind: Kind
    model: str
    max_context_tokens: int
    max_running: int
    tells: Tells
    isolation: Isolation
    version: str = ""
    tells_note: str = ""
    isolation_note: str = ""
    forced_note: str = ""
    block_size: int | None = None
    num_blocks: int | None = None
    fingerprint: str = ""
    capabilities: frozenset[Capability] = frozenset()
    takes_grammars: bool = True
    is_chat: bool = False

    def guarantees(self) -> list[Guarantee]:
        """What an engine in front of this server keeps of the protocol's promises."""
        tells, forced = self.tells != "never", "forced_tools" in self.capabilities
        written = (
            "what was marked less what the server reused"
            if tells
            else "not told: what the server reused is counted as written"
        )
        return [
            Guarantee("exact_read", tells, self.tells_note),
            Guarantee("exact_write", tells, written),
            Guarantee("hold", False, "no_hold: the server evicts when it wants"),
            Guarantee("isolation", self.isolation != "none", self.isolation_note),
            Guarantee("events", False, "evictions are not told; an entry ends when less is reused"),
            Guarantee("forced_tools", forced, self.forced_note),
        ]


def check_counts(order: Order, told: int, cached: int | None) -> None:
    """Raise UpstreamError unless the server computed the prompt that we sent."""
    sent = len(order.token_ids)
    if told != sent:
        raise UpstreamError(f"the server counted {told} tokens of a prompt of {sent}")
    if cached is not None and not 0 <= cached <= sent:
        raise UpstreamError(f"the server says that it reused {cached} of {sent} tokens")


class CalledFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: CalledFunction = CalledFunction()


class ChatDelta(msgspec.Struct, frozen=True):
    """What is read of a delta of OpenAI's. Both names of thoughts are in use."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came since the last one. `cached_tokens` None: not told with this piece.

    `finish`: why the server ended it, where our parser sees no end. `delta` is what came of a
    server of conversations, `finish_reason` why it ended, `sampled_tokens` how many tokens its
    whole answer had.
    """

    token_ids: Sequence[TokenId] = ()
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    is_last: bool = False
    finish: FinishReason | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None
    sampled_tokens: int | None = None


class Server:
    """One model server, by the API of its kind. All methods are called on one event loop.

    Each raises UpstreamError, or UpstreamGone where the server can't be reached.
    """

    ALIVE: ClassVar[str] = "/health"
    # For people: where it tells what it reused, what it lacks where it does not, and whether it
    # keeps scopes apart where nothing shows that.
    TOLD_BY: ClassVar[str] = "usage.prompt_tokens_details.cached_tokens"
    NOT_TOLD: ClassVar[str] = "its usage has no prompt_tokens_details.cached_tokens"
    UNPROVEN: ClassVar[str] = "the server knows no scopes"

    def __init__(self, wire: Wire, files: ModelFacts) -> None:
        self._wire = wire
        self._files = files

    async def find_facts(self) -> Facts:
        """Look at the server once. Raises UpstreamRefused where it can't be used."""
        raise NotImplementedError

    async def fingerprint(self) -> str:
        """Raises UpstreamGone where it does not answer."""
        await self._wire.check_alive(self.ALIVE)
        return ""

    async def prefill(self, order: Order, place: Place) -> Piece:
        """Compute the prompt alone, for servers that tell what they reused at the end only."""
        raise NotImplementedError

    def generate(self, order: Order, place: Place = ANYWHERE) -> AsyncGenerator[Piece, None]:
        """Run a choice to its end; closing the iterator ends it at the server too."""
        raise NotImplementedError

    async def close(self) -> None:
        await self._wire.close()
