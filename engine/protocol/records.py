"""What an engine keeps of a request until the gateway has acknowledged it."""

import msgspec

from engine.protocol.frames import FinishReason
from engine.protocol.usage import InputUsage


class AckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Also asks for the records of requests whose final counts are not acknowledged."""

    request_ids: list[str]


class KeptRecord(msgspec.Struct, frozen=True):
    request_id: str
    # What the gateway sent as `record` with the request.
    record: str


class FinalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one request used, kept until it is acknowledged."""

    request_id: str
    epoch: str
    reason: FinishReason
    # None: it ended before `Started`.
    usage: InputUsage | None = None
    output_tokens: int = 0
    thinking_tokens: int = 0
    # Without a `usage`: the prompt's tokens that went through the model, each place counted once.
    prefilled_tokens: int = 0
    # The request's. It tells the workspace where the journal is lost.
    scope: str = ""
