"""The rows of a batch: what they ask, the order in which they run, and how one of them runs."""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway.base.bounds import RequestBounds
from gateway.base.catalogue import Model
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.dialects.anthropic.lower import ask_of
from gateway.dialects.anthropic.request import Version, decode_batch, decode_messages
from gateway.dialects.lowering import Asked
from gateway.ledger.stored import BatchItem
from gateway.prompt.ask import Ask, Principal
from gateway.prompt.media import Unreadable

ROW_BYTES, BATCH_BYTES = 512, 16_384
"""What a row and a batch count besides the rows' bodies, for their places in the database.

So a workspace can't fill the database with millions of rows of a few bytes each.
"""
_COMPRESSION = 1
_MAX_NAMES = 64
_PIECE_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """Makes an Ask of a row's body, as the Messages API does of a request's."""

    bounds: RequestBounds
    find_model: Callable[[str], Model]
    removes_nonces: bool
    unreadable: Unreadable
    auto_cache_messages: bool
    most_rows: int
    clock: Clock

    def ask(self, body: bytes, principal: Principal, version: Version) -> Ask:
        """Raise the error that a request with this body would be answered with."""
        decoded = decode_messages(body, self.bounds)
        model, arrived = self.find_model(decoded.model), self.clock.monotonic()
        asked = Asked(principal, model, arrived, self.unreadable, self.removes_nonces)
        ask = ask_of(decoded, asked, version, marks_for_client=self.auto_cache_messages)
        return msgspec.structs.replace(ask, stream=False, is_batch=True)

    def kept(self, params: bytes, principal: Principal, version: Version) -> Ask:
        """`ask` of a row's body as a `BatchItem` has it."""
        return self.ask(zlib.decompress(params), principal, version)


def ranked(
    reader: RowReader, body: bytes, principal: Principal, version: Version
) -> tuple[list[BatchItem], int]:
    """The rows of a batch's body, and the bytes that it counts. Rows that begin alike have
    neighbouring ranks.

    A row that can't be read is no error of the batch: it is answered with its own. A thread does
    this for seconds, and rests as long as it works, so that turns have the processor meanwhile.
    """
    given = decode_batch(body, reader.bounds, reader.most_rows)
    found: list[tuple[list[str], str]] = []
    begun = time.monotonic()
    for item in given:
        found.append(_prefix_of(reader, bytes(item.params), principal, version))
        if (worked := time.monotonic() - begun) > _PIECE_SECONDS:
            time.sleep(worked)
            begun = time.monotonic()
    order = sorted(range(len(given)), key=lambda position: (found[position][0], position))
    ranks = {position: rank for rank, position in enumerate(order)}
    items = [
        BatchItem(
            position=position,
            custom_id=item.custom_id,
            rank=ranks[position],
            prefix=found[position][1],
            params=zlib.compress(bytes(item.params), _COMPRESSION),
        )
        for position, item in enumerate(given)
    ]
    return items, BATCH_BYTES + sum(ROW_BYTES + len(item.params) for item in given)


def _prefix_of(
    reader: RowReader, body: bytes, principal: Principal, version: Version
) -> tuple[list[str], str]:
    """The sort key of a row (model and names of prefixes), and the name of its shared prefix."""
    try:
        ask = reader.ask(body, principal, version)
    except GatewayError:
        return [], ""
    names = [prefix.name.digest for prefix in ask.plan.prefixes[:_MAX_NAMES]]
    marked = ask.plan.deepest_marked()
    shared = marked[0] if marked is not None else (names[0] if names else "")
    return [ask.model.id, *names], shared
