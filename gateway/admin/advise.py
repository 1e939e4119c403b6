"""Where markers would have paid: POST /admin/v1/advise."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar.di import NamedDependency

from engine.protocol import InputUsage
from gateway.admin.controller import AdminController, Deps, action
from gateway.admin.ranges import MAX_MS, Span, range_of
from gateway.admin.structs.advice import AdviceReport, StreamAdvice
from gateway.advice import pasted
from gateway.advice.observation import Observation, Row, Served, observe
from gateway.advice.pasted import MAX_REQUESTS, PastedDialect
from gateway.advice.request import advise_request, with_own_paths
from gateway.advice.stream import advise_stream
from gateway.base.errors import InvalidRequest, NotFound
from gateway.http.auth import READS_BY_POST, AdminRequest, Viewer
from gateway.http.presence import while_present
from gateway.http.query import NO_NUL
from gateway.http.services import Services
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import observed
from gateway.limits.workers import INLINE_BYTES
from gateway.prices.sheets import PriceSheets
from gateway.prompt.fingerprint import unpack

MAX_TURNS = 60_000
MAX_STREAMS = 50
DEFAULT_MIN_TOKENS = 1024
# Advices wait for each other: one thread computes for all.
_LINE = "advice"
_APART_MS = 1000
StreamKey = tuple[str, str, str]
_Ms = Annotated[int, msgspec.Meta(ge=0, le=MAX_MS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=NO_NUL)]


class AdviseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `requests`, or a range of the ledger.

    `requests` are texts (JSON of any dialect, or a curl command) or JSON objects, 20 at most and in
    the order of their sending; their `dialect` is told from the body where it is not named. Without
    them the turns of the range count, the last hour by default: the newest `max_turns` of them.
    `min_tokens` is the shortest prefix that is held; by default the model's.
    """

    requests: Annotated[list[Any], msgspec.Meta(max_length=MAX_REQUESTS)] = []
    dialect: PastedDialect | None = None
    workspace: _Name | None = None
    key: _Name | None = None
    model: _Name | None = None
    since_ms: _Ms | None = None
    until_ms: _Ms | None = None
    max_turns: Annotated[int, msgspec.Meta(ge=1, le=MAX_TURNS)] = MAX_TURNS
    min_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None


class AdviseController(AdminController):
    path = "/admin/v1/advise"

    @action(
        "/",
        "advise",
        "Which markers would have paid, and what breaks prefixes.",
        AdviseRequest,
        **READS_BY_POST,
    )
    async def advise(
        self,
        request: AdminRequest,
        asked: NamedDependency[AdviseRequest],
        services: Deps,
    ) -> AdviceReport:
        own = request.user.confine(asked.workspace)
        if asked.requests:
            least = partial(min_tokens_of, services)
            on = services.clock.wall().date()
            prices = services.prices.own
            work = in_thread(services, request.user, _LINE, of_requests, asked, prices, on, least)
            found: AdviceReport = await while_present(request, work)
            return found
        span = Span(since_ms=asked.since_ms, until_ms=asked.until_ms)
        of = range_of(services, span, own, model=asked.model)
        return await while_present(request, of_range(services, of, asked, request.user))


async def of_range(
    services: Services, of: Range, asked: AdviseRequest, viewer: Viewer
) -> AdviceReport:
    gathering = Gathering(services.prices.own)
    pages = observed(services.queries.ledger, of, asked.key, asked.max_turns)
    async for rows in pages:
        await in_thread(services, viewer, _LINE, gathering.take, rows)
    advices = []
    for (_, _, model), turns in gathering.largest():
        least = asked.min_tokens or min_tokens_of(services, model)
        advices.append(await in_thread(services, viewer, _LINE, advise_stream, turns, least))
    return gathering.report(of, advices, asked.max_turns)


def of_requests(
    asked: AdviseRequest, prices: PriceSheets, on: date, min_tokens: Callable[[str], int]
) -> AdviceReport:
    """`min_tokens` is asked with a model's name. Raise InvalidRequest by the request's number."""
    turns, found, plans, least = [], [], [], 1
    for number, given in enumerate(asked.requests):
        try:
            read = pasted.read(given, asked.dialect)
            price = prices.find(str(read.body.get("model", "")), on)
            rates = None if price is None else price.rates
            turn = pasted.observation_of(read, number, number * _APART_MS, rates)
        except InvalidRequest as error:
            raise InvalidRequest(f"requests[{number}]: {error}") from None
        least = asked.min_tokens or min_tokens(turn.model)
        turns.append(turn)
        plans.append(read)
        found.append(advise_request(read, turn, least))
    streams = [with_own_paths(advise_stream(turns, least), plans)] if len(turns) > 1 else []
    return AdviceReport(
        text=f"{len(turns)} pasted request{'s' * (len(turns) > 1)}, tokens estimated from bytes.",
        num_turns=len(turns),
        num_without_sketch=0,
        is_cut=False,
        since_ms=None,
        until_ms=None,
        streams=streams,
        requests=found,
    )


async def in_thread(
    services: Services, viewer: Viewer, line: str, work: Any, *arguments: Any
) -> Any:
    """Off the event loop. One piece of a line's work runs at a time; keys take turns."""
    return await services.workers.run(viewer.key_id, INLINE_BYTES + 1, work, *arguments, line=line)


def min_tokens_of(services: Services, model: str) -> int:
    """The shortest prefix that is held for a model: its own, else its engines'."""
    try:
        found = services.find_model(model)
    except NotFound:
        return DEFAULT_MIN_TOKENS
    if found.min_cache_tokens is not None:
        return max(found.min_cache_tokens, 1)
    told = [
        engine.description.min_cache_tokens
        for engine in services.fleet.engines
        if engine.description and found.is_served_by(engine.description.model)
    ]
    return max([*told, 1]) if told else DEFAULT_MIN_TOKENS


class Gathering:
    """Turns of the ledger, by stream. Rows come the newest first."""

    def __init__(self, prices: PriceSheets) -> None:
        self._prices = prices
        self._streams: dict[StreamKey, list[Observation]] = defaultdict(list)
        self._num_turns = 0
        self._num_without = 0

    def take(self, rows: Sequence[Any]) -> None:
        for row in rows:
            self._num_turns += 1
            turn = observe(row_of(row, self._prices), unpack(row.fingerprint))
            if turn is None:
                self._num_without += 1
            else:
                self._streams[turn.workspace, turn.key, turn.model].append(turn)

    def largest(self) -> list[tuple[StreamKey, list[Observation]]]:
        """The streams with the most tokens, each in order of time."""
        by_tokens = sorted(
            self._streams.items(), key=lambda each: -sum(turn.total for turn in each[1])
        )
        return [(key, turns[::-1]) for key, turns in by_tokens[:MAX_STREAMS]]

    def report(self, of: Range, advices: list[StreamAdvice], max_turns: int) -> AdviceReport:
        is_cut = self._num_turns >= max_turns
        return AdviceReport(
            text=self._text(is_cut),
            num_turns=self._num_turns,
            num_without_sketch=self._num_without,
            is_cut=is_cut,
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            streams=advices,
            requests=[],
        )

    def _text(self, is_cut: bool) -> str:
        if not self._num_turns:
            return "No request of this range had an answer: there is nothing to advise on."
        text = f"{self._num_turns:,} requests were looked at"
        if is_cut:
            text += ", the newest of the range"
        if self._num_without:
            text += f"; {self._num_without:,} of an earlier version could not be compared"
        left_out = len(self._streams) - MAX_STREAMS
        if left_out > 0:
            text += f"; {left_out:,} smaller groups of key and model are left out"
        return text + "."


def row_of(row: Any, prices: PriceSheets) -> Row:
    price = prices.with_id(row.price) if row.price else None
    usage = InputUsage(**{name: getattr(row, name) for name in InputUsage.__struct_fields__})
    begun_ms = row.opened_ms + int((row.first_token_seconds or 0.0) * 1000)
    return Row(
        id=row.id,
        at_ms=row.opened_ms,
        workspace=row.workspace_id,
        key=row.key_id,
        model=row.model,
        dialect=row.dialect,
        served=Served(
            usage=usage,
            begun_ms=begun_ms,
            prefill_seconds=row.prefill_seconds,
        ),
        rates=None if price is None else price.rates_above(usage.prompt_tokens - 1),
    )
