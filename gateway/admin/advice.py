"""What would pay: advice on markers, and its summary of a week."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar.di import NamedDependency

from engine.protocol import InputUsage
from gateway.admin import controller
from gateway.admission.workers import INLINE_BYTES
from gateway.advice import duplicates, pasted
from gateway.advice.observation import Observation, Row, observe
from gateway.advice.pasted import MAX_REQUESTS, PastedDialect, advise_request, with_own_paths
from gateway.advice.stream import advise_stream
from gateway.advice.summary import MIN_TURNS, summary_lines
from gateway.advice.verdicts import reconciled, total
from gateway.base.errors import InvalidRequest, NotFound, Overloaded
from gateway.base.words import counted
from gateway.http.auth import READS_BY_POST, AdminRequest, Viewer
from gateway.http.generation import while_present
from gateway.http.query import NO_NUL
from gateway.http.services import Services
from gateway.ledger.reads.prefill_times import TokenTimes, token_times
from gateway.ledger.reads.prefixes import prefixes
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import newest_writers, observed
from gateway.planning import traffic
from gateway.prices.price import PriceSheets
from gateway.prompt.fingerprint import unpack
from gateway.structs import advice as structs

MAX_TURNS = 60_000
MAX_STREAMS = 50
MAX_NEAR = 20
"""The most groups of near-duplicate prefixes, in all workspaces together."""

# The place of all advice in the line for threads: one thread computes at a time.
_LINE = "advice"
_APART_MS = 1000
_HEAD = ("tools", "system")
StreamKey = tuple[str, str, str]
_Ms = Annotated[int, msgspec.Meta(ge=0, le=controller.MAX_MS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=NO_NUL)]


class AdviseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What advice is asked for: either `requests`, or a range of the ledger.

    - `requests`: 20 at most, in the order in which they are sent. Each is a JSON object, or a text
      with JSON of any dialect or a curl command
    - `dialect`: the dialect of the requests. Without it each body tells its dialect
    - `since_ms`, `until_ms`: the range, by default the last hour
    - `max_turns`: the most turns that count, from the newest of the range on
    - `min_tokens`: the tokens of the shortest prefix that is held, by default the model's number
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


class AdviseController(controller.AdminController):
    path = "/admin/v1/advise"

    @controller.action(
        "/",
        "advise",
        "Which markers would have paid, and what breaks prefixes.",
        AdviseRequest,
        **READS_BY_POST,
    )
    async def advise(
        self,
        request: AdminRequest,
        payload: NamedDependency[AdviseRequest],
        services: controller.Deps,
    ) -> structs.AdviceReport:
        confined = request.user.confine(payload.workspace)
        if payload.requests:
            least = partial(min_tokens_of, services)
            on = services.clock.wall().date()
            prices = services.prices.own
            work = in_thread(services, request.user, _LINE, of_requests, payload, prices, on, least)
            report: structs.AdviceReport = await while_present(request.scope, work)
            return report
        span = controller.Span(since_ms=payload.since_ms, until_ms=payload.until_ms)
        of = controller.range_of(services, span, confined, model=payload.model)
        return await while_present(request.scope, of_range(services, of, payload, request.user))


async def of_range(
    services: Services, of: Range, payload: AdviseRequest, viewer: Viewer
) -> structs.AdviceReport:
    times = await token_times(services.queries.ledger, services.catalogue.name_of)
    gathering = Gathering(services.prices.own, times)
    pages = observed(services.queries.ledger, of, payload.key, payload.max_turns)
    async for rows in pages:
        await in_thread(services, viewer, _LINE, gathering.take, rows)
    advices = []
    for (_, _, model), turns in gathering.largest():
        least = payload.min_tokens or min_tokens_of(services, model)
        advices.append(await in_thread(services, viewer, _LINE, advise_stream, turns, least))
    near: list[structs.NearDuplicate | None] = []
    for (workspace, model), turns in gathering.together():
        least = payload.min_tokens or min_tokens_of(services, model)
        groups = await in_thread(services, viewer, _LINE, duplicates.find_groups, turns, least)
        for group in groups[: MAX_NEAR - len(near)]:
            prompts: dict[str, Any] = {}
            # Such viewers may read stored prompts.
            if viewer.workspace is not None or viewer.may_change:
                prompts = await _kept_prompts(services, workspace, group.compared)
            near.append(
                await in_thread(
                    services, viewer, _LINE, duplicates.near_duplicate, group, least, prompts
                )
            )
    return gathering.report(of, advices, payload.max_turns, [group for group in near if group])


async def _kept_prompts(
    services: Services, workspace: str, turn_ids: Iterable[str]
) -> dict[str, Any]:
    """The stored prompts of these turns, by turn id. Turns without one are left out."""
    prompts = dict[str, Any]()
    for turn_id in turn_ids:
        with suppress(NotFound):
            content, _ = await services.turns.content_writer.read(workspace, turn_id)
            prompts[turn_id] = content.prompt
    return prompts


def of_requests(
    payload: AdviseRequest, prices: PriceSheets, on: date, min_tokens: Callable[[str], int]
) -> structs.AdviceReport:
    """Advice on pasted requests. `min_tokens` gives the shortest prefix that is held for a model.

    Raise InvalidRequest, which names the wrong request by its number.
    """
    turns = []
    advices = []
    requests = []
    least = 1
    for number, source in enumerate(payload.requests):
        try:
            request = pasted.read(source, payload.dialect)
            price = prices.find(str(request.body.get("model", "")), on)
            rates = None if price is None else price.rates
            turn = pasted.observation_of(request, number, number * _APART_MS, rates)
        except InvalidRequest as error:
            raise InvalidRequest(f"requests[{number}]: {error}") from None
        least = payload.min_tokens or min_tokens(turn.model)
        turns.append(turn)
        requests.append(request)
        advices.append(advise_request(request, turn, least))
    streams = [advise_stream(turns, least)] if len(turns) > 1 else []
    prompts = {
        turn.id: {part: msgspec.to_builtins(getattr(request.plan.prompt, part)) for part in _HEAD}
        for turn, request in zip(turns, requests, strict=True)
    }
    groups = duplicates.find_groups(turns, least)
    near = [duplicates.near_duplicate(group, least, prompts) for group in groups]
    streams, kept = reconciled(streams, [group for group in near if group])
    return structs.AdviceReport(
        text=f"{len(turns)} pasted request{'s' * (len(turns) > 1)}, tokens estimated from bytes.",
        num_turns=len(turns),
        num_without_sketch=0,
        is_cut=False,
        since_ms=None,
        until_ms=None,
        streams=[with_own_paths(stream, requests) for stream in streams],
        requests=advices,
        saves=total([stream.saves for stream in streams]),
        near_duplicates=kept,
    )


async def in_thread(
    services: Services, viewer: Viewer, line: str, work: Any, *arguments: Any
) -> Any:
    """Run `work` in a thread. The pieces of work in one line run one at a time, and the viewers'
    keys take turns."""
    return await services.workers.run(viewer.key_id, INLINE_BYTES + 1, work, *arguments, line=line)


def min_tokens_of(services: Services, model: str) -> int:
    """The tokens of the shortest prefix that is held for a model: the model's own number, or else
    its engines'."""
    try:
        model_there = services.catalogue.find(model, services.fleet.served)
    except NotFound:
        return traffic.DEFAULT_MIN_TOKENS
    if model_there.min_cache_tokens is not None:
        return max(model_there.min_cache_tokens, 1)
    lengths = [
        engine.description.min_cache_tokens
        for engine in services.fleet.engines
        if engine.description and model_there.is_served_by(engine.description.model)
    ]
    return max([*lengths, 1]) if lengths else traffic.DEFAULT_MIN_TOKENS


class Gathering:
    """Gathers turns of the ledger by stream. Rows must come the newest first."""

    def __init__(self, prices: PriceSheets, times: TokenTimes) -> None:
        self._prices = prices
        self._times = times
        self._token_seconds: dict[tuple[str | None, str], float | None] = {}
        self._streams: dict[StreamKey, list[Observation]] = defaultdict(list)
        self._num_turns = 0
        self._num_without = 0

    def take(self, rows: Sequence[Any]) -> None:
        for row in rows:
            self._num_turns += 1
            turn = observation_of(row, self._prices, self._token_seconds_of(row))
            if turn is None:
                self._num_without += 1
            else:
                self._streams[turn.workspace, turn.key, turn.model].append(turn)

    def _token_seconds_of(self, row: Any) -> float | None:
        """The seconds that the engine of a turn takes for one token of a prompt. Each engine's time
        is fitted once."""
        key = row.engine, row.model
        if key not in self._token_seconds:
            time = self._times.of(*key)
            self._token_seconds[key] = None if time is None else time.seconds
        return self._token_seconds[key]

    def largest(self) -> list[tuple[StreamKey, list[Observation]]]:
        """The streams with the most tokens, each in order of time."""
        by_tokens = sorted(
            self._streams.items(), key=lambda item: -sum(turn.total for turn in item[1])
        )
        return [(key, turns[::-1]) for key, turns in by_tokens[:MAX_STREAMS]]

    def together(self) -> list[tuple[tuple[str, str], list[Observation]]]:
        """The turns of the largest streams by workspace and model, each in order of time."""
        streams: dict[tuple[str, str], list[Observation]] = defaultdict(list)
        for (workspace, _, model), turns in self.largest():
            streams[workspace, model] += turns
        return [(key, sorted(turns, key=lambda turn: turn.at_ms)) for key, turns in streams.items()]

    def report(
        self,
        of: Range,
        advices: list[structs.StreamAdvice],
        max_turns: int,
        near: Sequence[structs.NearDuplicate] = (),
    ) -> structs.AdviceReport:
        is_cut = self._num_turns >= max_turns
        text = f"{counted(self._num_turns, 'request was', 'requests were')} looked at"
        if is_cut:
            text += ", the newest of the range"
        if self._num_without:
            text += f"; {self._num_without:,} of an earlier version could not be compared"
        left_out = len(self._streams) - MAX_STREAMS
        if left_out > 0:
            text += f"; {left_out:,} smaller groups of key and model are left out"
        advices, kept = reconciled(advices, near)
        nothing = "No request of this range had an answer: there is nothing to advise on."
        return structs.AdviceReport(
            text=f"{text}." if self._num_turns else nothing,
            num_turns=self._num_turns,
            num_without_sketch=self._num_without,
            is_cut=is_cut,
            since_ms=of.since_ms,
            until_ms=of.until_ms,
            streams=advices,
            requests=[],
            saves=total([stream.saves for stream in advices]),
            near_duplicates=kept,
        )


def observation_of(
    row: Any, prices: PriceSheets, token_seconds: float | None = None
) -> Observation | None:
    """A turn's observation; None where its fingerprint is of an earlier version."""
    price = prices.with_id(row.price) if row.price else None
    usage = InputUsage(**{name: getattr(row, name) for name in InputUsage.__struct_fields__})
    turn = Row(
        id=row.id,
        at_ms=row.opened_ms,
        workspace=row.workspace_id,
        key=row.key_id,
        model=row.model,
        dialect=row.dialect,
        usage=usage,
        begun_ms=row.opened_ms + int((row.first_token_seconds or 0.0) * 1000),
        token_seconds=token_seconds,
        rates=None if price is None else price.rates_above(usage.prompt_tokens - 1),
    )
    return observe(turn, unpack(row.fingerprint))


WEEK_MS = 7 * 86_400_000
MAX_SUMMARY_TURNS = 20_000
"""The most turns of a summary, as on the dashboard's page Advice."""
MAX_PREFIXES = 100
"""The most prefixes of a summary, as on the dashboard's page Savings."""
DEADLINE_SECONDS = 60.0
SUMMARY_SECONDS = 600.0
"""How long a summary is reused. A summary is about a week, so it hardly changes in this time."""
_MAX_SUMMARIES = 64
_NUM_TURNS_NAMED = 5


class AdviceSummaryController(controller.AdminController):
    path = "/admin/v1/advice/summary"

    @controller.view(
        "/", "summarizeAdvice", "What would have paid in the last 7 days, in a few sentences."
    )
    async def summary(
        self,
        request: AdminRequest,
        services: controller.Deps,
        workspace: controller.WorkspaceName = None,
    ) -> structs.AdviceSummary:
        confined = request.user.confine(workspace)

        async def read_or_make() -> structs.AdviceSummary:
            summaries = services.summaries
            # One caller makes the summary of a workspace. Nobody waits for another workspace's.
            async with services.summarizing.setdefault(confined, asyncio.Lock()):
                now = services.clock.monotonic()
                if confined not in summaries or now - summaries[confined][0] >= SUMMARY_SECONDS:
                    summaries[confined] = now, await summarized(services, confined, request.user)
                    while len(summaries) > _MAX_SUMMARIES:
                        del summaries[min(summaries, key=lambda name: summaries[name][0])]
                summary: structs.AdviceSummary = summaries[confined][1]
                return summary

        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await while_present(request.scope, read_or_make())
        except TimeoutError:
            message = f"the advice took longer than {DEADLINE_SECONDS:.0f} seconds"
            raise Overloaded(message) from None


async def summarized(
    services: Services, workspace: str | None, viewer: Viewer
) -> structs.AdviceSummary:
    """The summary of one workspace. With None it is the summary of all workspaces."""
    until = controller.now_ms(services.clock)
    of = Range(since_ms=max(until - WEEK_MS, 0), until_ms=until, workspace=workspace)
    ledger = services.queries.ledger
    report = await of_range(services, of, AdviseRequest(max_turns=MAX_SUMMARY_TURNS), viewer)
    reports = await prefixes(ledger, of, services.prices.own, MAX_PREFIXES)
    totals = await services.queries.totals_by(of, ("workspace_id",))
    lines, num_more = summary_lines(
        report.streams,
        reports,
        {name: sums for (name,), sums in totals.items()},
        {key.id: key.name for key in await services.keys.all(workspace)},
    )
    for number, line in enumerate(lines):
        if line.kind == "unpaid" and line.workspace is not None:
            writers = await newest_writers(ledger, of, line.workspace, _NUM_TURNS_NAMED)
            lines[number] = msgspec.structs.replace(line, turns=writers)
    sizes = [stream.num_turns for stream in report.streams]
    num_judged = sum(size for size in sizes if size >= MIN_TURNS)
    small = sum(size < MIN_TURNS for size in sizes)
    if lines:
        text = f"The last 7 days: {report.text}"
    elif num_judged:
        text = f"Nothing to advise. {report.text}"
    else:
        text = f"Too few requests to advise on. {report.text}"
    if small:
        groups = counted(small, "group of key and model", "groups of key and model")
        text += f" {groups} with fewer than {MIN_TURNS} requests gave no line."
    if not report.num_turns:
        text = "No request of the last 7 days had an answer: there is nothing to advise on."
        if lines:
            text = "No request of the last 7 days could be compared block by block."
    return structs.AdviceSummary(
        text=text,
        since_ms=of.since_ms,
        until_ms=of.until_ms,
        num_turns=report.num_turns,
        num_judged=num_judged,
        is_cut=report.is_cut,
        lines=lines,
        num_more=num_more,
    )
