"""The body of a batch of messages, and its decoding."""

import re

import msgspec
from msgspec import Raw

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.bodies import check_values, read, split_complaint


class BatchItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`params` is the body of a message; it is read when the row is ranked, and when it runs."""

    custom_id: str
    params: Raw


class CreateBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: list[BatchItem]


_batch = msgspec.json.Decoder(CreateBatch)
_CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def decode_batch(body: bytes, bounds: RequestBounds, most_rows: int) -> list[BatchItem]:
    """The rows of a batch. Raise InvalidRequest that names the field, or TooLarge."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)

    def explained(complaint: str) -> InvalidRequest:
        what, path = split_complaint(complaint)
        return InvalidRequest(f"{path.removeprefix('.') or 'body'}: {what[:200]}")

    items = read(lambda: _batch.decode(body), explained).requests
    if not items:
        raise InvalidRequest("requests: must have at least one item")
    if len(items) > most_rows:
        raise InvalidRequest(f"requests: may have at most {most_rows} items")
    custom_ids: set[str] = set()
    for index, item in enumerate(items):
        if not _CUSTOM_ID.fullmatch(item.custom_id):
            raise InvalidRequest(
                f"requests.{index}.custom_id: must be 1 to 64 letters, digits, `_` or `-`"
            )
        if item.custom_id in custom_ids:
            raise InvalidRequest(f"requests.{index}.custom_id: stands twice in the batch")
        custom_ids.add(item.custom_id)
    return items
