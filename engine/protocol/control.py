"""Requests about a turn or a lease that is there already, and the reply to any that failed."""

import msgspec

from engine.protocol.frames import InputUsage
from engine.protocol.values import ErrorCode, FinishReason


class CancelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str


class CancelReply(msgspec.Struct, frozen=True):
    """False when the request is unknown or has ended: cancelling is idempotent."""

    cancelled: bool


class AckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_ids: list[str]


class RecordsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the records of requests whose final counts are not acknowledged."""

    request_ids: list[str]


class KeptRecord(msgspec.Struct, frozen=True):
    """What the gateway sent as `record` with a request."""

    request_id: str
    record: str


class FinalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one request used, kept until acknowledged. `usage` is None if it ended before `Started`.

    `prefilled_tokens` of its prompt had then gone through the model, each place counted once. It is
    0 beside a `usage`, whose `computed_tokens` have the same.
    `scope` is the request's. It tells the workspace where the gateway's journal is lost.
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


class ClockAdvance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class ClockReply(msgspec.Struct, frozen=True):
    now: float


class ErrorReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`is_public`: the message tells nothing but of the request's own fields, for its client."""

    code: ErrorCode
    message: str
    is_public: bool = False
