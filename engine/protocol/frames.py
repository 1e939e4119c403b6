"""The frames of one generation, in the order in which they come."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.protocol.approximations import Approximation
from engine.protocol.entries import BreakpointReport, MissReason, Receipt, Tier
from engine.protocol.errors import ErrorCode
from engine.protocol.usage import InputUsage

FinishReason = Literal[
    "stop", "length", "stop_sequence", "tool_use", "cancelled", "context", "too_costly", "failed"
]


ALLOWED_TOOLS = ""
"""Stands in place of a tool's name if the choice of callable tools can't be guaranteed."""


class UnheldTool(msgspec.Struct, frozen=True):
    """A demand on tool calls that the engine can't guarantee."""

    # A strict tool whose calls may break its schema, or ALLOWED_TOOLS.
    tool: str
    # Why it can't be guaranteed, in words.
    reason: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The first frame. Its input counts are final, and the entries are readable from here on."""

    request_id: str
    epoch: str
    usage: InputUsage
    breakpoints: list[BreakpointReport]
    receipt: Receipt
    miss_reason: MissReason | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    unheld: list[UnheldTool] = []
    # Segments of system messages that the template can't place. Their text is in the user's turn.
    folded: list[int] = []
    # Segments of breakpoints whose last token spans their end. Their entries end before that token.
    inexact: list[int] = []
    # The lowest tier that `usage.cache_read_tokens` came from; None: nothing was read.
    read_tier: Tier | None = None
    # From admission until all read content was on the device; 0: it was there already.
    bring_back_seconds: float = 0.0
    # The approximation that the answer rests on; None: all is exact.
    approximate: Approximation | None = None
    # The leases granted in the epoch so far. Those that this frame tells of are among them.
    leases_granted: int = 0


class TokenProb(msgspec.Struct, frozen=True):
    """A token and how likely it was."""

    token: bytes
    token_id: int
    # The natural logarithm of its probability, -9999 at least.
    logprob: float


class DrawnToken(msgspec.Struct, frozen=True):
    """A token of the text, and the most likely tokens at its place.

    The probabilities are the model's own: at temperature 1, without penalties, biases and grammars.
    """

    drawn: TokenProb
    # The most likely token first.
    top: list[TokenProb]


class TextDelta(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    text: str
    choice: int = 0
    # The tokens that this text is made of, if the request wants log-probabilities.
    logprobs: list[DrawnToken] = []


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking"):
    text: str
    choice: int = 0


class ToolUseStart(msgspec.Struct, frozen=True, tag="tool_use"):
    """Opens a call. `ToolInputDelta`s follow until another block opens or the choice finishes."""

    id: str
    name: str
    choice: int = 0


class ToolInputDelta(msgspec.Struct, frozen=True, tag="tool_input"):
    partial_json: str
    choice: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """One choice ended."""

    reason: FinishReason
    # All sampled tokens. The end marker counts as well.
    output_tokens: int
    thinking_tokens: int = 0
    stop_sequence: str | None = None
    choice: int = 0
    # Why the choice failed. Only the reason `failed` may come with it.
    code: ErrorCode | UnsetType = UNSET


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The last frame of a generation that worked."""

    request_id: str
    output_tokens: int
    decode_seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The last frame of a generation that did not work."""

    code: ErrorCode
    message: str


Delta = TextDelta | ThinkingDelta | ToolUseStart | ToolInputDelta

Frame = Started | Delta | Finished | Done | Failed
