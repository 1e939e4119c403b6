"""What an engine keeps about a request until the gateway acknowledges it."""

import msgspec

from engine.protocol.frames import FinishReason
from engine.protocol.usage import InputUsage


class AckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names requests: to acknowledge their final counts, or to get their kept records."""

    request_ids: list[str]


class KeptRecord(msgspec.Struct, frozen=True):
    request_id: str
    # The request's field `record`, as the gateway sent it.
    record: str


class FinalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one request used, kept until it is acknowledged."""

    request_id: str
    epoch: str
    reason: FinishReason
    # None: the request ended before `Started`.
    usage: InputUsage | None = None
    output_tokens: int = 0
    thinking_tokens: int = 0
    # If there is no `usage`: the prompt's positions that the model computed, each counted once.
    prefilled_tokens: int = 0
    # The request's scope. It tells the workspace if the gateway's journal is lost.
    scope: str = ""
