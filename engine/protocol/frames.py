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
"""In the place of a tool's name: the choice of the tools that may be called can't be guaranteed."""


class UnheldTool(msgspec.Struct, frozen=True):
    """A strict tool whose calls need not keep to its schema, or ALLOWED_TOOLS, and why."""

    tool: str
    reason: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The first frame: final input counters. From here on the entries are readable."""

    request_id: str
    epoch: str
    usage: InputUsage
    breakpoints: list[BreakpointReport]
    receipt: Receipt
    miss_reason: MissReason | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    unheld: list[UnheldTool] = []
    # The segments of system messages that the chat template can't take where they stand. They are
    # told in the user's turn beside them.
    folded: list[int] = []
    # The breakpoints' segments whose last tokens depend on the text behind them. Their boundary
    # lies before their text's end.
    inexact: list[int] = []
    # The lowest tier that `usage.cache_read_tokens` came from; None: nothing was read.
    read_tier: Tier | None = None
    # From admission until all that was read was on the device; 0: it was there.
    bring_back_seconds: float = 0.0
    # None: all is exact.
    approximate: Approximation | None = None
    # The leases of the epoch so far, this response's among them. So nobody who reads frames knows
    # of fewer leases than clients were told of.
    leases_granted: int = 0


class TokenProb(msgspec.Struct, frozen=True):
    """A token and how likely it was."""

    token: bytes
    token_id: int
    # Natural, and -9999 at least.
    logprob: float


class DrawnToken(msgspec.Struct, frozen=True):
    """A token of the text beside the most likely tokens at its place.

    The distribution is the model's own: at temperature 1, without penalties, biases and grammars.
    """

    drawn: TokenProb
    # The most likely token first.
    top: list[TokenProb]


class TextDelta(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    text: str
    choice: int = 0
    # Those of the tokens that this text is made of, where the request wants them.
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
    """One choice ended."""

    reason: FinishReason
    # Every sampled token, the end marker included.
    output_tokens: int
    thinking_tokens: int = 0
    stop_sequence: str | None = None
    choice: int = 0
    # Why, where the reason is `failed` and more is known than that.
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
