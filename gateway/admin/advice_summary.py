"""What would pay, of the last seven days in a few sentences: GET /admin/v1/advice/summary."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec

from gateway.admin.advise import AdviseRequest, of_range
from gateway.admin.controller import AdminController, Deps, view
from gateway.admin.ranges import WorkspaceName, now_ms
from gateway.admin.structs.advice import AdviceReport, AdviceSummary
from gateway.admin.structs.usage import PrefixReport, Totals
from gateway.advice.summary import MIN_TURNS, KnownPrefix, Spent, summary_lines
from gateway.base.errors import Overloaded
from gateway.http.auth import AdminRequest, Viewer
from gateway.http.presence import while_present
from gateway.http.services import Services
from gateway.ledger.reads.prefixes import prefixes
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import newest_writers

WEEK_MS = 7 * 86_400_000
MAX_TURNS = 20_000
"""As many as the dashboard's page Advice looks at."""
MAX_PREFIXES = 100
"""As many as the dashboard's page Savings shows."""
DEADLINE_SECONDS = 60.0
_NUM_TURNS_NAMED = 5


class AdviceSummaryController(AdminController):
    path = "/admin/v1/advice/summary"

    @view("/", "summarizeAdvice", "What would pay, of the last 7 days in a few sentences.")
    async def summary(
        self,
        request: AdminRequest,
        services: Deps,
        workspace: WorkspaceName = None,
    ) -> AdviceSummary:
        own = request.user.confine(workspace)

        async def make() -> AdviceSummary:
            return await summarized(services, own, request.user)

        asked = services.summaries.get(own, services.clock.monotonic(), make)
        found: AdviceSummary = await while_present(request, _in_time(asked))
        return found


async def _in_time(asked: Coroutine[Any, Any, AdviceSummary]) -> AdviceSummary:
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await asked
    except TimeoutError:
        raise Overloaded(f"the advice took longer than {DEADLINE_SECONDS:.0f} seconds") from None


async def summarized(services: Services, workspace: str | None, viewer: Viewer) -> AdviceSummary:
    """Of one workspace, or of all for None."""
    until = now_ms(services.clock)
    of = Range(since_ms=max(until - WEEK_MS, 0), until_ms=until, workspace=workspace)
    ledger = services.queries.ledger
    report = await of_range(services, of, AdviseRequest(max_turns=MAX_TURNS), viewer)
    known = await prefixes(ledger, of, services.prices.own, MAX_PREFIXES)
    totals = await services.queries.totals_by(of, ("workspace_id",))
    lines, num_more = summary_lines(
        report.streams,
        [each for one in known for each in _known(one)],
        [_spent(name, sums) for (name,), sums in totals.items()],
    )
    for number, line in enumerate(lines):
        if line.kind == "unpaid" and line.workspace is not None:
            writers = await newest_writers(ledger, of, line.workspace, _NUM_TURNS_NAMED)
            lines[number] = msgspec.structs.replace(line, turns=writers)
    return AdviceSummary(
        text=_text(report, has_lines=bool(lines)),
        since_ms=of.since_ms,
        until_ms=of.until_ms,
        num_turns=report.num_turns,
        is_cut=report.is_cut,
        lines=lines,
        num_more=num_more,
    )


def _text(report: AdviceReport, *, has_lines: bool) -> str:
    if not report.num_turns:
        if has_lines:
            return "No request of the last 7 days could be compared block by block."
        return "No request of the last 7 days had an answer: there is nothing to advise on."
    text = f"The last 7 days: {report.text}" if has_lines else f"Nothing to advise. {report.text}"
    small = sum(stream.num_turns < MIN_TURNS for stream in report.streams)
    if small:
        groups = "group of key and model" if small == 1 else "groups of key and model"
        text += f" {small:,} {groups} with fewer than {MIN_TURNS} requests gave no line."
    return text


def _known(found: PrefixReport) -> Iterable[KnownPrefix]:
    """Nothing of a prefix whose costs are not known, or that has the better TTL."""
    if not found.better_ttl_saves_nano or found.better_ttl is None:
        return
    marked = found.cache_read_tokens + found.written_tokens
    tokens = marked / found.requests
    in_5m, in_1h = found.gaps_5m, found.gaps_5m + found.gaps_1h
    with_5m = 1.25 * (found.requests - in_5m) + 0.1 * in_5m
    with_1h = 2.0 * (found.requests - in_1h) + 0.1 * in_1h
    is_hour = found.better_ttl == "1h"
    yield KnownPrefix(
        workspace=found.workspace,
        better_ttl="1h" if is_hour else "5m",
        saves_nano=found.better_ttl_saves_nano,
        saves_multiples=tokens * (with_5m - with_1h if is_hour else with_1h - with_5m),
        num_turns=found.requests,
        last_turn=None if found.look is None else found.look.last_turn,
    )


def _spent(workspace: str, sums: Totals) -> Spent:
    return Spent(
        workspace=workspace,
        num_turns=sums.requests,
        read=sums.cache_read_tokens,
        written=sums.written_tokens,
        write_premium=sums.write_premium,
        prompt_tokens=sums.prompt_tokens,
        saved_nano=None if sums.unpriced else sums.saved_nano,
    )
