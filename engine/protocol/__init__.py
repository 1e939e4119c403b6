"""The engine protocol: every request, frame and event that crosses the engine's socket.

`../PROTOCOL.md` says what they promise. This module is all of the engine that the gateway's turns
import. It knows nothing but msgspec. All counts are tokens, all durations are seconds, all digests
are lower-case hex.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

PROTOCOL_VERSION = 1
SCOPE_HEADER = "x-scope"
"""Has the scope of a generation or a count: workers are shared fairly before a body is read."""
EPOCH_HEADER = "x-epoch"
"""Has the epoch that a generation is meant for. An engine of another one refuses it as `not_ready`:
what the gateway knows of the engine, its model too, is of a process that is gone."""
MAX_NAMES = 512
MAX_BREAKPOINTS = 4
MAX_DOCUMENTS = 64
MAX_CELLS = 2048
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
MAX_PENALTY = 100.0
MAX_RECORD_BYTES = 4096
MAX_IMAGES = 100
MAX_IMAGE_PIXELS = 4096 * 4096
MAX_PROMPT_PIXELS = 6 * MAX_IMAGE_PIXELS
"""Of all images together: decoded, a pixel has three bytes."""
IMAGE_REFERENCE = re.compile(r"\[image ([0-9a-f]{64})\]")
"""Stands for an image in a text, by its id. Of an id that the prompt lacks it is text."""

NotNegative = Annotated[int, Meta(ge=0)]
Ttl = Literal["5m", "30m", "1h"]


class TtlClass(NamedTuple):
    """`write_multiple` is what a token written for so long costs, in input tokens, unless a price
    says otherwise; `words` are the TTL for people."""

    seconds: int
    write_multiple: float
    words: str


TTLS: dict[Ttl, TtlClass] = {
    "5m": TtlClass(300, 1.25, "5 minutes"),
    "30m": TtlClass(1800, 1.25, "30 minutes"),
    "1h": TtlClass(3600, 2.0, "1 hour"),
}
"""The classes of lifetimes, the shortest first."""


def outlives(one: Ttl, other: Ttl) -> bool:
    return TTLS[one].seconds > TTLS[other].seconds


Role = Literal["user", "assistant", "system"]
Tier = Literal["device", "host", "disk"]
ServiceClass = Literal["interactive", "batch"]
EntryState = Literal["leased", "best_effort", "none"]
FinishReason = Literal[
    "stop", "length", "stop_sequence", "tool_use", "cancelled", "context", "too_costly", "failed"
]
Capability = Literal[
    "copy_on_write",
    "multiple_choices",
    "tools",
    "forced_tools",
    "structured_output",
    "strict_tools",
    "penalties",
    "repetition_penalty",
    "min_p",
    "stop_token_ids",
    "min_tokens",
    "logprobs",
    "thinking",
    "manual_clock",
    "block_map",
    "service_class",
    "own_template",
    "lookback_to",
    "images",
]
Scorer = Literal["kvzip", "keydiff", "chunkkv", "snapkv", "h2o", "sinks", "random"]
SCORERS: tuple[Scorer, ...] = get_args(Scorer)
DEFAULT_SCORER: Scorer = "kvzip"
Method = Scorer | Literal["blocks", "sibling"]
LEAST_KEEP = 0.1
KEEP_FIELD = "breakpoints: keep"
"""What refusals of a `Breakpoint.keep` begin with."""
SIBLING_FIELD = "breakpoints: sibling"
DEFAULT_RECOMPUTE = 16
MAX_RECOMPUTE = 1_000_000
SHARE_PARTS = 10_000
"""A share of a document's tokens is told in such parts."""
Recompute = (
    Annotated[int, Meta(ge=0, le=MAX_RECOMPUTE)]
    | Annotated[float, Meta(ge=1 / SHARE_PARTS, le=1 - 1 / SHARE_PARTS)]
)
"""So many of a document's first tokens, or a share of all."""
MissReason = Literal[
    "cold",
    "no_breakpoint",
    "no_boundary",
    "below_minimum",
    "ttl_expired",
    "best_effort_evicted",
    "sacrificed",
    "dropped",
    "lookback_exceeded",
    "in_progress_race",
    "not_told",
    "damaged",
    "grew",
]
"""`grew`: of a breakpoint alone. What was read ends before it, and nothing ever stood there."""
BestEffortReason = Literal[
    "automatic", "over_budget", "sacrificed", "yielded", "on_host", "on_disk", "no_hold"
]
"""`automatic`: no breakpoint with `hold` asked for a lease."""
GuaranteeName = Literal["exact_read", "exact_write", "hold", "isolation", "events", "forced_tools"]
ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "prompt_too_long",
    "too_costly",
    "duplicate_request",
    "unsupported",
    "not_found",
    "overloaded",
    "not_ready",
    "cancelled",
    "internal",
]
STATUS_OF: dict[ErrorCode, int] = dict.fromkeys(get_args(ErrorCode), 400) | {
    "unauthorized": 401,
    "not_found": 404,
    "duplicate_request": 409,
    "cancelled": 499,
    "internal": 500,
    "not_ready": 503,
    "overloaded": 529,
}


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tool definition; `input_schema` keeps the client's key order.

    A call of a `strict` tool keeps to the schema (capability `strict_tools`).
    """

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool = False


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    text: str


class ToolUsePart(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultPart(msgspec.Struct, frozen=True, tag="tool_result"):
    tool_use_id: str
    text: str
    is_error: bool = False


Part = TextPart | ThinkingPart | ToolUsePart | ToolResultPart


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. Consecutive messages of one role are merged before they get here."""

    role: Role
    parts: list[Part]


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A PNG, JPEG, GIF or WebP file, and what its header says, in pixels.

    The `id` (64 hex digits) is the HMAC-SHA256 of `data` under the scope. So nobody who does not
    know the scope can write its reference, and an equal image of another scope is another one.
    """

    id: str
    media_type: str
    data: bytes
    width: int
    height: int

    @property
    def reference(self) -> str:
        return f"[image {self.id}]"


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation, or a raw `text`: that bypasses the chat template and excludes all else.

    `named_tools` may be called like `tools`. Their definitions are in the messages, so that no
    template renders them and they are no segments. A text shows each of the `images` (a capability)
    where it has its reference.
    """

    messages: list[Message]
    tools: list[Tool] = []
    system: list[TextPart] = []
    text: str | None = None
    named_tools: list[Tool] = []
    images: list[Image] = []

    @property
    def callable_tools(self) -> list[Tool]:
        """Every tool that the model may call."""
        return [*self.tools, *self.named_tools] if self.named_tools else self.tools

    @property
    def num_segments(self) -> int:
        """Segments are numbered from 0: each tool, each system block, each message part.

        A raw text is one.
        """
        if self.text is not None:
            return 1
        return len(self.tools) + len(self.system) + sum(len(m.parts) for m in self.messages)


class Breakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A segment end whose prefix the client wants held for `ttl`.

    With `seconds` the entry lives that long instead, and reads do not prolong it; `ttl` is the
    class that its write is billed as. With `keep` that part of the prefix's tokens is kept in each
    layer, chosen by `scorer`, and what follows is computed behind them: an approximation. One
    breakpoint of a request may have it. Breakpoints in front of it hold nothing. With `sibling` the
    prefix may be read from an entry of the sibling model: another approximation, where there is a
    longer entry of it than of this model. One breakpoint of a request may have one of both.
    Without `hold` nobody asks for memory: the entry is best-effort, and gives way in the order of
    use, until a breakpoint with `hold` reads it.
    """

    segment: NotNegative
    ttl: Ttl = "5m"
    seconds: Annotated[float, Meta(gt=0)] | None = None
    keep: Annotated[float, Meta(ge=LEAST_KEEP, lt=1)] | None = None
    scorer: Scorer = DEFAULT_SCORER
    sibling: bool = False
    hold: bool = True

    @property
    def is_approximate(self) -> bool:
        """Whether its prefix is asked to be anything else than exact."""
        return self.keep is not None or self.sibling


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A segment whose text is computed by itself, and is read wherever it stands.

    What is held for `ttl` is the exact entry of the prompt's first token and the text. In a prompt
    the first `recompute` of its tokens are computed, or the share of them, below 1, whose values
    differ most. The others' keys and values are copied, the keys turned to
    their new positions: an approximation, and so is all that follows. While the prompt's own blocks
    have the copy, an entry that ended is not written again. The `name` is the gateway's digest of
    the text alone, and is held while the entry's blocks are.
    """

    segment: NotNegative
    ttl: Ttl = "5m"
    recompute: Recompute = DEFAULT_RECOMPUTE
    name: str = ""

    def num_recomputed(self, num_tokens: int) -> int:
        """How many of its tokens are computed where it stands."""
        if isinstance(self.recompute, int):
            return self.recompute
        return -(-num_tokens * round(self.recompute * SHARE_PARTS) // SHARE_PARTS)


class Compressed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="compressed"):
    """What an answer's prompt was computed behind: `kept` of its first `of` tokens in each layer,
    of which the part `keep` was asked for."""

    scorer: Scorer
    keep: float
    kept: int
    of: int

    @property
    def text(self) -> str:
        return f"compressed {self.scorer} {self.keep:g}: {self.kept} of {self.of}"

    @property
    def method(self) -> Method:
        return self.scorer


class Blocks(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="blocks"):
    """So many `documents` stand in an answer's prompt. Of their tokens `reused` were copied, or
    read with an entry of this prompt, and `recomputed` computed where they stand."""

    method: ClassVar[Method] = "blocks"
    documents: int
    reused: int
    recomputed: int

    @property
    def text(self) -> str:
        return f"blocks {self.documents}: {self.reused} reused, {self.recomputed} recomputed"


class FromSibling(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sibling"):
    """The first `reused` tokens of an answer's prompt were read from a sibling model's entry, now
    or when an entry of this prompt was written, but for the first `recomputed_layers`
    `of_layers`. With 0 the prompt is exact."""

    method: ClassVar[Method] = "sibling"
    reused: int
    recomputed_layers: int
    of_layers: int

    @property
    def text(self) -> str:
        if not self.reused:
            return "sibling: 0 reused"
        layers = f"{self.recomputed_layers} of {self.of_layers} layers"
        return f"sibling: {self.reused} reused, {layers} recomputed"


Approximation = Compressed | Blocks | FromSibling


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gateway's digest (16 hex digits) of the prefix that ends in `segment`.

    `characters` None means at the segment's end, else after that many characters of its text.
    """

    digest: str
    segment: NotNegative
    characters: int | None = None


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`max_tokens` 0 pre-warms: nothing is generated; None is what is left of the context.

    `temperature` 0 is greedy, `top_p` 1 and `top_k` 0 are off. A field of NEUTRAL that is None is
    what the model's makers recommend. `seed` makes sampling repeatable on one engine build.
    `ignore_eos` goes on past the tokens that end a turn.

    `stop_token_ids` end a turn too, and before `min_tokens` no token does. A token less likely than
    the most likely one times `min_p` is not drawn.

    Each logit is raised by its token's `logit_bias` and lowered by `presence_penalty` where the
    choice has the token, and by `frequency_penalty` for each time that it has it; the prompt does
    not count. It does for `repetition_penalty`: a token that was there has its logit divided by it
    where that is positive, else multiplied. With `logprobs` the text's deltas have the
    log-probabilities of their tokens, and of so many of the most likely ones.
    """

    max_tokens: NotNegative | None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: NotNegative | None = None
    stop_sequences: list[str] = []
    seed: int | None = None
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_PENALTY)] | None = None
    logit_bias: dict[int, float] = {}
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKENS)] = []
    min_tokens: NotNegative = 0

    @property
    def needs(self) -> list[tuple[str, Capability]]:
        """The fields that ask for something, each with the capability that does it."""
        return [
            (name, capability)
            for name, capability in _NEEDS.items()
            if getattr(self, name) not in (None, NEUTRAL.get(name), getattr(_UNSET, name))
        ]


NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""How a token is drawn where neither the request nor the model's makers say."""
_UNSET = Sampling(max_tokens=None)
_NEEDS: dict[str, Capability] = {
    "num_choices": "multiple_choices",
    "logit_bias": "penalties",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "repetition_penalty": "repetition_penalty",
    "min_p": "min_p",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_tokens",
    "logprobs": "logprobs",
}
SAMPLING_CAPABILITIES: tuple[Capability, ...] = (
    *("penalties", "repetition_penalty", "min_p", "stop_token_ids", "min_tokens"),
)
"""Those of an engine that draws each token itself, or tells one that does."""


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`any` and `tool` need the capability `forced_tools`; `none` parses no calls.

    Without `parallel` there is one call at most. With mode `any`, empty `names` are all tools.
    """

    mode: Literal["auto", "none", "any", "tool"] = "auto"
    name: str | None = None
    parallel: bool = True
    names: list[str] = []

    def allows(self, name: str) -> bool:
        """Whether a forced call may be of this tool."""
        if self.mode == "tool":
            return name == self.name
        return not self.names or name in self.names


class GenerateRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One turn for an engine.

    `request_id` is the idempotence key; `scope` the tenant salt (32 hex digits); `age_seconds` the
    time since the turn arrived at the gateway: TTLs count from then. `min_cache_tokens` None means
    the engine's own minimum. With an `output_schema` (capability `structured_output`) the text is
    JSON of that schema, with an `output_pattern` it matches that regular expression as a whole.
    `lease_share` is the part (0 to 1) of the lease budget that the scope gets
    even where others have it all, from this request on; None is the engine's own. With the
    `service_class` (a capability) `batch` it is computed behind the interactive ones. With
    `lookback_to` (a capability) look-ups go back to that segment, over any number of positions.
    `adapter` is the digest of the adapter that answers, one of the description's; empty is none.
    `record` is the gateway's own: an engine that `keeps_records` gives it back until counts are
    acknowledged.
    """

    request_id: Annotated[str, Meta(min_length=1)]
    scope: Annotated[str, Meta(min_length=1)]
    prompt: Prompt
    sampling: Sampling
    breakpoints: Annotated[list[Breakpoint], Meta(max_length=MAX_BREAKPOINTS)] = []
    documents: Annotated[list[Document], Meta(max_length=MAX_DOCUMENTS)] = []
    names: Annotated[list[Name], Meta(max_length=MAX_NAMES)] = []
    age_seconds: Annotated[float, Meta(ge=0, lt=86_400)] = 0.0
    min_cache_tokens: NotNegative | None = None
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool = False
    output_schema: dict[str, Any] | None = None
    output_pattern: str | None = None
    lease_share: float | None = None
    service_class: ServiceClass = "interactive"
    lookback_to: NotNegative | None = None
    adapter: str = ""
    record: str = ""

    @property
    def binds_text(self) -> bool:
        return self.output_schema is not None or self.output_pattern is not None


class CountRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Same prompt rules as `GenerateRequest`; touches no entry and no lease."""

    scope: str
    prompt: Prompt
    thinking: bool = False


class CountReply(msgspec.Struct, frozen=True):
    """`segment_tokens[i]` is the offset of segment i's end, None where it has no boundary."""

    input_tokens: int
    segment_tokens: list[int | None]


# The frames of one generation, in the order in which they come.

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

    `expires_in_seconds` is a promise: only a `leased` one has it. `reason` says why there is no
    entry, or why nothing holds it. `missed` says why what stands up to it was not read in full;
    None where it was. Engines of earlier versions leave it out.
    """

    segment: int
    state: EntryState
    tokens: int | None = None
    ttl: Ttl | None = None
    expires_in_seconds: float | None = None
    reason: MissReason | BestEffortReason | None = None
    missed: MissReason | UnsetType | None = UNSET


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine now holds of the request's names.

    `name_tokens` is aligned with the request's `names`; the first `num_held` of them are in
    `tier`, the first `num_leased` under a lease for `lease_seconds` more. `copied` has for each
    document, in order, as many positions as are copied of it, up to its end.
    """

    name_tokens: list[int]
    num_held: int
    num_leased: int = 0
    lease_seconds: float | None = None
    tier: Tier = "device"
    copied: list[tuple[int, int]] = []


class UnheldTool(msgspec.Struct, frozen=True):
    """A strict tool whose calls are not held to its schema, and why."""

    tool: str
    reason: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The first frame: final input counters. From here on the entries are readable.

    `folded` are the segments of system messages that the chat template can't take where they
    stand: they are told in the user's turn beside it. `inexact` are the breakpoints' segments whose
    last tokens depend on the text behind them: their boundary lies before their text's end.

    `approximate` is None where all is exact. `read_tier` is the lowest tier that
    `usage.cache_read_tokens` came from; None without a read. `bring_back_seconds` are those from
    admission until all of it was on the device; 0 where it was. `leases_granted` counts those of
    the epoch so far, this response's among them: what is known of it is never less than what
    clients were told.
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
    approximate: Approximation | None = None
    leases_granted: int = 0


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
Frame = Started | Delta | Finished | Done | Failed


class HeldName(msgspec.Struct, frozen=True):
    digest: str
    tokens: int


class ChainHeld(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """These names (a chain, shortest first) are in `tier`, the leased ones for `lease_seconds`."""

    seq: int
    names: list[HeldName]
    tier: Tier = "device"
    num_leased: int = 0
    lease_seconds: float | None = None


class ChainGone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """These names are no longer in memory."""

    seq: int
    names: list[str]
    reason: Literal["evicted", "dropped"]


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="lease_ended"):
    """A lease ended; `names` are those that lost it. The blocks may still be in memory."""

    seq: int
    entry: str
    names: list[str]
    reason: Literal["expired", "sacrificed", "yielded", "dropped", "damaged"]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Everything held as of `seq`; events after it follow with `seq + 1`, `seq + 2`, …"""

    seq: int
    epoch: str
    chains: list[ChainHeld]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent when nothing happened for a while; `seq` is the last event's."""

    seq: int


Event = ChainHeld | ChainGone | LeaseEnded
EventFrame = Snapshot | Event | Heartbeat


class CancelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str


class CancelReply(msgspec.Struct, frozen=True):
    """False when the request is unknown or has ended: cancelling is idempotent."""

    cancelled: bool


class AckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Also asks for the records of requests whose final counts are not acknowledged."""

    request_ids: list[str]


class NamesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks which of these names are held. The reply is a list of `ChainHeld` of those that are."""

    names: Annotated[list[str], Meta(max_length=MAX_NAMES)]


class KeptRecord(msgspec.Struct, frozen=True):
    """What the gateway sent as `record` with a request."""

    request_id: str
    record: str


class FinalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one request used, kept until acknowledged. `usage` is None if it ended before `Started`.

    `prefilled_tokens` of its prompt had then gone through the model, each place counted once; 0
    beside a `usage`. `scope` is the request's: it tells the workspace where the journal is lost.
    """

    request_id: str
    epoch: str
    reason: FinishReason
    usage: InputUsage | None = None
    output_tokens: int = 0
    thinking_tokens: int = 0
    prefilled_tokens: int = 0
    scope: str = ""


class DropRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End leases of a scope by an operator's hand; `entry` None drops all of them."""

    scope: str
    entry: str | None = None


class DropReply(msgspec.Struct, frozen=True):
    dropped: int


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load the adapter in the folder of this name, in place of the one that has it."""

    name: str


class ClockAdvance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class ClockReply(msgspec.Struct, frozen=True):
    now: float


class ErrorReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`is_public`: the message tells nothing but of the request's own fields, for its client."""

    code: ErrorCode
    message: str
    is_public: bool = False
