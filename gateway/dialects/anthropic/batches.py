"""The bodies of /v1/messages/batches: a batch, its rows, their results."""

import re
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import Raw

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.response import Message
from gateway.dialects.bodies import check_values, read, split_complaint
from gateway.dialects.errors import AnthropicError

_CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class BatchItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`params` is the body of a message; it is read when the row is ranked, and when it runs."""

    custom_id: str
    params: Raw


class CreateBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: list[BatchItem]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`request_counts` add up to the rows. `results_url` is there once the batch has ended."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: str
    request_counts: RequestCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class Succeeded(msgspec.Struct, frozen=True, tag="succeeded"):
    message: Message


class Errored(msgspec.Struct, frozen=True, tag="errored"):
    error: AnthropicError


class Canceled(msgspec.Struct, frozen=True, tag="canceled"): ...


class Expired(msgspec.Struct, frozen=True, tag="expired"): ...


BatchResult = Succeeded | Errored | Canceled | Expired


class ResultLine(msgspec.Struct, frozen=True):
    """One line of the results; `result` is a BatchResult."""

    custom_id: str
    result: Raw


_batch = msgspec.json.Decoder(CreateBatch)


def _explained(complaint: str) -> InvalidRequest:
    what, path = split_complaint(complaint)
    return InvalidRequest(f"{path.removeprefix('.') or 'body'}: {what[:200]}")


def decode_batch(body: bytes, bounds: RequestBounds, most_rows: int) -> list[BatchItem]:
    """The rows of a batch. Raise InvalidRequest that names the field, or TooLarge."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    items = read(lambda: _batch.decode(body), _explained).requests
    if not items:
        raise InvalidRequest("requests: must have at least one item")
    if len(items) > most_rows:
        raise InvalidRequest(f"requests: may have at most {most_rows} items")
    seen: set[str] = set()
    for index, item in enumerate(items):
        if not _CUSTOM_ID.fullmatch(item.custom_id):
            raise InvalidRequest(
                f"requests.{index}.custom_id: must be 1 to 64 letters, digits, `_` or `-`"
            )
        if item.custom_id in seen:
            raise InvalidRequest(f"requests.{index}.custom_id: stands twice in the batch")
        seen.add(item.custom_id)
    return items
