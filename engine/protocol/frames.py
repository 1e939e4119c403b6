"""The frames of one generation, in the order in which they come."""

from collections.abc import Iterable

import msgspec

from engine.protocol.values import (
    TTLS,
    BestEffortReason,
    EntryState,
    ErrorCode,
    FinishReason,
    MissReason,
    Tier,
    Ttl,
)

WRITE_FIELDS: dict[Ttl, str] = {ttl: f"cache_write_{ttl}_tokens" for ttl in TTLS}
"""The field of each TTL class's writes, wherever such tokens are counted."""


class CacheUsage(msgspec.Struct, kw_only=True):
    """Tokens read from entries, and those written to entries of each TTL class."""

    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_30m_tokens: int = 0
    cache_write_1h_tokens: int = 0

    @property
    def writes(self) -> dict[Ttl, int]:
        return {ttl: getattr(self, name) for ttl, name in WRITE_FIELDS.items()}

    @property
    def written_tokens(self) -> int:
        return sum(self.writes.values())

    @property
    def write_premium(self) -> float:
        """What writing cost more than computing alone, in input tokens."""
        return sum(tokens * (TTLS[ttl].write_multiple - 1) for ttl, tokens in self.writes.items())


class InputUsage(CacheUsage, kw_only=True):
    """The prompt's tokens by class: input, read and written add up to the prompt.

    `automatic_tokens` were reused from memory beyond the read without being billed as one: they
    are part of the writes or of `input_tokens`. `computed_tokens` went through the model.
    """

    input_tokens: int = 0
    automatic_tokens: int = 0
    computed_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.input_tokens + self.cache_read_tokens + self.written_tokens


def split_writes(marks: Iterable[tuple[int, Ttl]], read: int) -> dict[Ttl, int]:
    """The tokens that breakpoints write behind the first `read` ones, by TTL class.

    `marks` are their ends, in tokens, and TTLs. The longest TTL comes first: "Mixed TTL" of the
    public prompt-caching contract.
    """
    ends = list(marks)
    writes: dict[Ttl, int] = {}
    position = read
    for ttl in reversed(TTLS):
        end = max((end for end, own in ends if own == ttl), default=position)
        writes[ttl] = max(end - position, 0)
        position = max(end, position)
    return writes


class BreakpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one breakpoint.

    `expires_in_seconds` is a promise, so it is there only where the state is `leased`. `reason`
    says why there is no entry, or why nothing holds it where the state is `best_effort`.
    """

    segment: int
    state: EntryState
    tokens: int | None = None
    ttl: Ttl | None = None
    expires_in_seconds: float | None = None
    reason: MissReason | BestEffortReason | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine now holds of the request's names.

    `name_tokens` is aligned with the request's `names`; the first `num_held` of them are in
    `tier`, the first `num_leased` under a lease for `lease_seconds` more.
    """

    name_tokens: list[int]
    num_held: int
    num_leased: int = 0
    lease_seconds: float | None = None
    tier: Tier = "device"


class UnheldTool(msgspec.Struct, frozen=True):
    """A strict tool whose calls are not held to its schema, and why."""

    tool: str
    reason: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The first frame: final input counters. From here on the entries are readable.

    `folded` are the segments of system messages that the chat template can't take where they
    stand: they are told in the user's turn beside it. `inexact` are the breakpoints' segments whose
    last tokens depend on the text behind them: their boundary lies before their text's end.

    `read_tier` is the lowest tier that `usage.cache_read_tokens` came from; None without a read.
    `bring_back_seconds` are those from admission until all of it was on the device; 0 where it was.
    """

    request_id: str
    epoch: str
    usage: InputUsage
    breakpoints: list[BreakpointReport]
    receipt: Receipt
    miss_reason: MissReason | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    unheld: list[UnheldTool] = []
    folded: list[int] = []
    inexact: list[int] = []
    read_tier: Tier | None = None
    bring_back_seconds: float = 0.0


class TokenProb(msgspec.Struct, frozen=True):
    """A token's bytes, and its natural log-probability, -9999 at least."""

    token: bytes
    token_id: int
    logprob: float


class DrawnToken(msgspec.Struct, frozen=True):
    """A token of the text, and the most likely tokens at its place, the most likely first.

    The distribution is the model's own: at temperature 1, without penalties, biases and grammars.
    """

    drawn: TokenProb
    top: list[TokenProb]


class TextDelta(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """`logprobs` are those of the tokens behind this text, where the request wants them."""

    text: str
    choice: int = 0
    logprobs: list[DrawnToken] = []


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking"):
    text: str
    choice: int = 0


class ToolUseStart(msgspec.Struct, frozen=True, tag="tool_use"):
    """Opens a call; `ToolInputDelta`s follow until another block opens or the choice finishes."""

    id: str
    name: str
    choice: int = 0


class ToolInputDelta(msgspec.Struct, frozen=True, tag="tool_input"):
    partial_json: str
    choice: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """One choice ended. `output_tokens` counts every sampled token, the end marker included."""

    reason: FinishReason
    output_tokens: int
    thinking_tokens: int = 0
    stop_sequence: str | None = None
    choice: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The last frame of a generation that worked."""

    request_id: str
    output_tokens: int
    decode_seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The last frame of one that did not."""

    code: ErrorCode
    message: str


Delta = TextDelta | ThinkingDelta | ToolUseStart | ToolInputDelta
Frame = (
    Started | TextDelta | ThinkingDelta | ToolUseStart | ToolInputDelta | Finished | Done | Failed
)
