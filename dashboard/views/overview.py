"""The Overview: is the cache working, and what is it saving?

The advice of the last seven days stands below the headline cards. The gateway may take seconds to
compute it, so a thread asks for it. The page shows the advice that has come, and looks again every
few seconds.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from urllib.parse import urlencode

import altair as alt
import streamlit as st

from dashboard.client import PATIENT_TIMEOUT, AdminClient, ClientError, KeyRefused
from dashboard.ui import filters, formats, live, parts, viewer
from dashboard.ui.charts import (
    CHART_HEIGHT,
    TOKENS,
    Row,
    bars_over_time,
    first_shown,
    moment,
    per_bucket,
    stacked,
    with_tokens,
)
from dashboard.ui.filters import Selection
from dashboard.ui.reasons import ADVICE, reason_title
from dashboard.views.fleet import engine_table, in_use_share
from dashboard.views.latency import compared, first_token_cards, why_none
from dashboard.views.requests import READ_NOTHING
from engine.protocol import TTLS, WRITE_FIELDS
from gateway.structs.advice import AdviceSummary, SummaryLine
from gateway.structs.fleet import ENDED_EARLY, EngineReport, LeasesKept
from gateway.structs.usage import Bucket, Latency, RefusalCounts, Savings, Usage

NUM_REASONS = 5
TOKEN_CLASSES = {
    "Read from cache": "cache_read_tokens",
    **{f"Written, {TTLS[ttl].words}": name for ttl, name in WRITE_FIELDS.items()},
    "Reused automatically": "automatic_input_tokens",
    "Computed, not written": "computed_input_tokens",
}
"""The classes of prompt tokens, in the order in which they are stacked from the bottom, with the
fields of their sums."""
# The least requests of a period that the page compares this one with: a number, and a share of this
# period's requests.
MIN_COMPARED = 20
MIN_COMPARED_SHARE = 0.1
KEPT_PATH = "/admin/v1/leases/kept"
ADVICE_PATH = "/admin/v1/advice/summary"
ASK_AGAIN_SECONDS = 900.0
_RETRY_SECONDS = 60.0
_LOOK_SECONDS = 3
_NUM_THREADS = 4
_WEEK = "week"
NUM_CHANGES = 3
"""How many changes are shown at once. The others are behind a click."""
_LINKED = {"advice": "Advice", "savings": "Savings"}


class View(NamedTuple):
    """What the page shows."""

    usage: Usage
    savings: Savings
    latency: Latency
    refused: RefusalCounts
    # The last two are None for a viewer who may not see them.
    engines: list[EngineReport] | None
    kept: LeasesKept | None


def read(client: AdminClient, selection: Selection) -> View:
    params = selection.params()
    query = {**selection.params("engine", "model"), "limit": 1}
    return View(
        client.get("/admin/v1/usage", Usage, params),
        client.get("/admin/v1/savings", Savings, params),
        client.get("/admin/v1/latency", Latency, params),
        client.get("/admin/v1/refusals/counts", RefusalCounts, query),
        client.get("/admin/v1/engines", list[EngineReport]) if viewer.is_admin() else None,
        client.get(KEPT_PATH, LeasesKept, selection.params("workspace", "model"))
        if viewer.is_admin()
        else None,
    )


def draw(view: View, selection: Selection) -> None:
    read_tokens = view.usage.totals.cache_read_tokens
    prefill_time = parts.time_spared(view.savings)
    if not view.usage.totals.requests:
        parts.hero(f"**Nothing was asked** in {selection.words}.")
    elif not read_tokens:
        parts.hero(f"**Nothing was read from the cache** in {selection.words}.")
    else:
        effect = "" if prefill_time is None else f", which spared {prefill_time}"
        parts.hero(
            f"**{formats.in_words(read_tokens).capitalize()} tokens were read, not computed** in"
            f" {selection.words}{effect}."
        )
    draw_cards(view)
    st.fragment(refresh_week, run_every=_LOOK_SECONDS, key="week")()
    draw_tokens(view.usage)
    draw_more_cards(view)
    left, right = st.columns(2, gap="large")
    with left:
        draw_reasons(view.usage)
    with right:
        draw_engines(view.engines)


def draw_more_cards(view: View) -> None:
    """Draw the cards below the chart: requests, latency, the pools and two more hit rates."""
    usage = view.usage
    comparison = compared(view.latency)
    refused = view.refused.requests
    with st.grid(3, min_column_width=190):
        note = f"{usage.totals.errors:,} failed" + (f", {refused:,} refused" if refused else "")
        parts.card("requests", formats.compact(usage.totals.requests), delta=note)
        why = why_none(view.latency)
        length = why
        if comparison is not None:
            model = parts.plain(comparison.model)
            length = f"{comparison.length} tokens" + (f", {model}" if model else "")
        first_token_cards(comparison, lambda _: length, why)
        if view.engines is not None:
            stats = [engine.stats for engine in view.engines if engine.stats is not None]
            silent = len(view.engines) - len(stats)
            in_use = formats.percent(in_use_share([s.blocks for s in stats]))
            unknown = f"{formats.counted(silent, 'engine')} not known" if silent else None
            parts.card("pool_in_use", in_use, delta=unknown)
        draw_rate(usage, "cacheable_hit_rate")
        draw_rate(usage, "request_hit_rate")


def draw_cards(view: View) -> None:
    """Draw the row of cards that answers the page's question: reuse, prefill time, leases kept and
    money."""
    usage = view.usage
    series = view.usage.series
    # All lines are over the intervals that had traffic: without traffic no rate is 0.
    whole_buckets = [
        bucket for bucket in series if bucket.totals.prompt_tokens and not bucket.is_partial
    ]
    saved = usage.saved_nano if usage.totals.is_priced else None
    before = usage.saved_nano_before if usage.before.is_priced else None
    with st.grid(4, min_column_width=190):
        rates = [
            bucket.totals.cache_read_tokens / bucket.totals.prompt_tokens
            for bucket in whole_buckets
        ]
        draw_rate(usage, "token_hit_rate", trend=rates)
        parts.card(
            "prefill_seconds_avoided",
            formats.seconds(view.savings.prefill_seconds_avoided),
            trend=[bucket.totals.cache_read_tokens for bucket in whole_buckets],
            chart="bar",
            delta=parts.tokens_spared(view.savings),
        )
        draw_kept(view.kept)
        parts.money_card(
            "saved_nano",
            saved,
            trend=[
                nano / formats.NANO
                for nano in accumulate(bucket.saved_nano for bucket in whole_buckets)
            ],
            delta=formats.change(saved, before, is_comparable=is_comparable(usage)),
            is_good=_is_good(saved, before) if is_comparable(usage) else None,
        )
    parts.placeholder_prices()


def is_comparable(usage: Usage) -> bool:
    """Whether the period before has enough requests to be compared with. All comparisons of the
    page follow this rule. With fewer requests, a difference shows when the traffic began, not how
    well the cache works."""
    least = max(MIN_COMPARED, MIN_COMPARED_SHARE * usage.totals.requests)
    return usage.before.requests >= least


def draw_rate(usage: Usage, number: str, trend: Sequence[float] | None = None) -> None:
    now = getattr(usage.rates, number)
    before = getattr(usage.rates_before, number)
    is_coloured = is_comparable(usage) and trend is not None
    parts.card(
        number,
        formats.percent(now),
        trend=trend,
        chart="area",
        delta=formats.points(now, before, is_comparable=is_comparable(usage)),
        is_good=_is_good(now, before) if is_coloured else None,
    )


def _is_good(now: float | None, before: float | None) -> bool | None:
    return None if now is None or before is None else now >= before


def draw_kept(kept: LeasesKept | None) -> None:
    """Draw the share of leases that lived to their end. It is shown as good only if the fate of all
    leases is known."""
    if kept is None:
        parts.card("leases_kept", formats.NO_VALUE, delta="an admin key shows it")
        return
    share = formats.percent(kept.share)
    if kept.share is not None and kept.not_known:
        share = f"≥ {share}"
    is_good = None
    if kept.lost:
        is_good = False
    elif kept.expired and not kept.not_known:
        is_good = True
    parts.card("leases_kept", share, delta=kept_in_words(kept), is_good=is_good)


def kept_in_words(kept: LeasesKept) -> str:
    """What became of the leases that did not live to their end."""
    lost = [f"{count:,} {ENDED_EARLY.get(reason, reason)}" for reason, count in kept.lost.items()]
    notes = [f"early: {', '.join(lost)}"] if lost else []
    if kept.not_known and kept.not_known_since_ms is not None:
        since = formats.since(kept.not_known_since_ms)
        notes.append(f"{kept.not_known:,} not known since {since}")
    if kept.released:
        notes.append(f"{kept.released:,} released by their workspace")
    if notes:
        return "; ".join(notes)
    if kept.expired:
        return "none ended early"
    return f"none has ended, {kept.held:,} held" if kept.held else "no lease is known"


def intervals(usage: Usage) -> list[tuple[Bucket, Row]]:
    """The intervals, each with the columns that its rows have in all charts: where it lies in the
    range."""
    rows: list[tuple[Bucket, Row]] = []
    for bucket in usage.series:
        since_ms = max(bucket.start_ms, usage.since_ms)
        until_ms = min(bucket.start_ms + usage.bucket_seconds * 1000, usage.until_ms)
        row = {
            "start": formats.moment(since_ms),
            "end": formats.moment(until_ms),
            "part": "cut by the range" if bucket.is_partial else "",
        }
        rows.append((bucket, row))
    return rows


def time_axis(usage: Usage) -> alt.X:
    """The time axis of the range. If most of the range lies before its first request, the axis
    begins at that request."""
    starts = (bucket.start_ms for bucket in usage.series if bucket.totals.requests)
    return moment(first_shown(starts, usage.since_ms, usage.until_ms), usage.until_ms)


def tokens_by_class(usage: Usage) -> list[Row]:
    """One row for each interval and class, stacked."""
    return [
        layer
        for bucket, row in intervals(usage)
        for layer in stacked(
            row,
            {name: getattr(bucket.totals, field) for name, field in TOKEN_CLASSES.items()},
            " tokens",
        )
    ]


def draw_tokens(usage: Usage) -> None:
    parts.heading("Prompt tokens by class", "prompt_tokens")
    totals = usage.totals
    if not totals.prompt_tokens:
        parts.empty(
            "No requests in this range. The first one appears here within seconds.", key="tokens"
        )
        return
    written = [f"{n:,} written for {TTLS[ttl].words}" for ttl, n in totals.writes.items()]
    rows = tokens_by_class(usage)
    drawn = bars_over_time(
        rows,
        with_tokens(TOKENS[viewer.theme()], (row["class"] for row in rows if row["amount"])),
        title=f"Prompt tokens {per_bucket(usage.bucket_seconds)}",
        x=time_axis(usage),
        height=CHART_HEIGHT + 40,
    )
    parts.chart(
        drawn,
        "tokens",
        f"Prompt tokens over time: {totals.cache_read_tokens:,} read,"
        f" {', '.join(written)},"
        f" {totals.automatic_input_tokens:,} reused automatically,"
        f" {totals.computed_input_tokens:,} computed and not written.",
    )


def draw_reasons(usage: Usage) -> None:
    """Draw the miss reasons in plain words, the most frequent first.

    Each has its share of the requests that have a reason. Together with the last lines they add up
    to all requests without a read.
    """
    parts.heading("Why prompts missed")
    draw_reason_notes(usage)
    reasons = usage.miss_reasons
    num_requests = usage.totals.requests
    if not reasons:
        message = "Nothing missed in this range." if num_requests else "No requests in this range."
        parts.empty(
            message, ":material/check_circle:" if num_requests else ":material/hourglass_empty:"
        )
        return
    counts = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    for reason, count in counts[:NUM_REASONS]:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.page_link(
                "views/requests.py",
                # Words of ours only: a link's label is Markdown.
                label=reason_title(reason) if reason in ADVICE else "Another reason",
                query_params={"reason": reason_title(reason), "hit": READ_NOTHING},
            )
            share = formats.percent(count / sum(reasons.values()))
            st.text(f"{share} · {formats.counted(count, 'request')}")
    num_others = sum(count for _, count in counts[NUM_REASONS:])
    if num_others:
        share = formats.percent(num_others / sum(reasons.values()))
        st.text(f"{share} · {formats.counted(num_others, 'request')} for other reasons")
    num_missed = num_requests - usage.totals.requests_with_read
    num_mixed = sum(usage.mixed_reasons.values())
    num_unknown = num_missed - sum(reasons.values()) - num_mixed
    if num_unknown > 0:
        more = formats.counted(num_unknown, "more request")
        st.caption(f"No reason is known of {more} without a read, such as those without an answer.")


def draw_reason_notes(usage: Usage) -> None:
    """Draw what the list of reasons does not count: reads in part, markers, and older requests."""
    num_parts = sum(usage.part_reasons.values())
    if num_parts:
        requests = formats.counted(num_parts, "request")
        st.caption(
            f"Of requests that read nothing. {requests} more read a part of what was marked."
        )
    num_marks = sum(usage.mark_reasons.values())
    if num_marks:
        num_grown = usage.mark_reasons.get("grew", 0)
        marks = formats.counted(num_marks, "marker")
        st.caption(
            f"{marks} were not read in full, {num_grown:,} of them new behind what was read."
        )
    num_mixed = sum(usage.mixed_reasons.values())
    if num_mixed:
        requests = formats.counted(num_mixed, "older request")
        st.caption(f"Of {requests} it is not known whether they read nothing or a part.")


def draw_engines(engines: list[EngineReport] | None) -> None:
    if engines is None:
        return
    columns = ("Engine", "State", "Up", "Running", "Waiting", "Pool in use")
    rows = [{name: row[name] for name in columns} for row in engine_table(engines)]
    ready = sum(row["State"] == "ready" for row in rows)
    alt_text = f"{ready} of {formats.counted(len(engines), 'engine')} ready."
    none = "The gateway knows no engine."
    parts.section("Engines now", rows, "engines_now", alt_text, none=none, icon=":material/dns:")


@dataclass(slots=True)
class _Week:
    """The week's advice for one workspace, as one client asks for it."""

    client: AdminClient
    # None: all workspaces.
    workspace: str | None
    # The answer that is still to come.
    answer: Future[AdviceSummary] | None = None
    # The last answer.
    summary: AdviceSummary | None = None
    # Why the last request failed; None: it did not fail.
    problem: str | None = None
    # When to ask again, in seconds of the monotonic clock.
    due: float = 0.0

    def look(self, now: float) -> None:
        """Take an answer that has come, and ask again when it is time. `now` is in seconds."""
        if self.answer is not None and self.answer.done():
            try:
                self.summary = self.answer.result()
                self.problem = None
                self.due = now + ASK_AGAIN_SECONDS
            except ClientError as error:
                # A viewer whose key was refused sees nothing, not even the last lines.
                if isinstance(error, KeyRefused):
                    self.summary = None
                self.problem = str(error)
                self.due = now + _RETRY_SECONDS
            self.answer = None
        if self.answer is None and now >= self.due:
            params = {"workspace": self.workspace}
            self.answer = _threads().submit(
                self.client.get, ADVICE_PATH, AdviceSummary, params, 0.0, PATIENT_TIMEOUT
            )


@st.cache_resource
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, "week")


def refresh_week() -> None:
    session = viewer.session()
    parts.heading("What should I change")
    # The advice is about the workspace, not about the range above.
    workspace = filters.chosen().workspace
    week: _Week | None = st.session_state.get(_WEEK)
    if week is None or week.client is not session.client or week.workspace != workspace:
        week = st.session_state[_WEEK] = _Week(session.client, workspace)
    week.look(time.monotonic())
    with st.container(key="week_body"):
        if week.summary is not None:
            draw_week(week.summary)
        elif week.problem is not None:
            parts.empty(f"There is no advice now. {week.problem}", ":material/cloud_off:")
        else:
            st.skeleton(height=120)


def refresh_week_alone() -> None:
    """Show the advice alone while the figures above it have not come."""
    if st.session_state.get("seen_overview") is None:
        refresh_week()


def draw_week(summary: AdviceSummary) -> None:
    if not summary.lines:
        icon = ":material/check_circle:" if summary.num_judged else parts.HOURGLASS
        parts.empty(summary.text, icon)
        return
    for number, line in enumerate(summary.lines[:NUM_CHANGES]):
        draw_line(line, number)
    hidden_lines = summary.lines[NUM_CHANGES:]
    if hidden_lines:
        with st.expander(f"{formats.counted(len(hidden_lines), 'more change')} that would pay"):
            for number, line in enumerate(hidden_lines, NUM_CHANGES):
                draw_line(line, number)
    more = f" {summary.num_more:,} smaller ones are not shown." if summary.num_more else ""
    st.caption(summary.text + more)


def draw_line(line: SummaryLine, number: int) -> None:
    """Draw one line: what it is worth, its sentence, and a link to where to look."""
    words, link = st.columns([6, 1], vertical_alignment="center")
    # The sentence has names from outside, so it is plain text.
    words.text(line_in_words(line))
    page = line.page if line.page in _LINKED else "advice"
    # The link opens a new tab, which takes its filters from the URL. This tab would keep its own.
    query = {"range": "7d", "workspace": line.workspace, "model": line.model}
    link.link_button(
        _LINKED[page],
        f"{page}?{urlencode({name: value for name, value in query.items() if value})}",
        icon=":material/open_in_new:",
        type="tertiary",
        key=f"week_{number}",
    )


def line_in_words(line: SummaryLine) -> str:
    """The line's sentence behind its money and, unless the sentence has them, its tokens."""
    tokens = f"{line.multiples:,.0f} input tokens"
    has_tokens = tokens in line.text
    if line.nano is None:
        return line.text if has_tokens else f"{tokens}: {line.text}"
    money = formats.dollars(line.nano)
    return f"{money}: {line.text}" if has_tokens else f"{money} ({tokens}): {line.text}"


if __name__ == "__main__":
    parts.title("Overview", "Is the cache working, and what is it saving?")
    live.show("overview", read, draw)
    st.fragment(refresh_week_alone, run_every=_LOOK_SECONDS, key="week_alone")()
