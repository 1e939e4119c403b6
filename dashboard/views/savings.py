"""Savings: what does caching save, where does it cost, and would the other TTL be cheaper?"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

import altair as alt
import streamlit as st

from dashboard.client import AdminClient, NotThere, segment
from dashboard.ui import charts, formats, live, parts, viewer
from dashboard.ui.charts import CHART_HEIGHT, MONEY, TEXT, Row, bars_over_time, per_bucket
from dashboard.ui.filters import Selection
from dashboard.ui.formats import NANO, dollars
from dashboard.ui.parts import in_dollars
from dashboard.views.overview import intervals, time_axis
from gateway.structs.usage import (
    JUDGED_TTLS,
    KEPT,
    Group,
    PrefixLook,
    PrefixReport,
    Savings,
    TurnBeginning,
    Usage,
    Waterfall,
)

NUM_PREFIXES = 100
NO_WORDS: Mapping[str, str] = MappingProxyType({})
NUM_WORDS = 20
"""So many prefixes are called by their first words: each is a kept prompt that is opened."""
WORDS_SECONDS = 60.0
"""How long first words stand after their prompt was deleted, at most."""
_LAST_SPACE = "lastindexof(datum.label, ' ')"
_LAST_WORD_BELOW = f"[slice(datum.label, 0, {_LAST_SPACE}), slice(datum.label, {_LAST_SPACE} + 1)]"


class View(NamedTuple):
    usage: Usage
    savings: Savings
    prefixes: list[PrefixReport]
    models: list[Group]
    workspaces: list[Group]
    words: Mapping[str, str]


def read(client: AdminClient, chosen: Selection) -> View:
    params = chosen.params()
    of_prefixes = {**chosen.params("engine"), "limit": NUM_PREFIXES}
    prefixes = client.get("/admin/v1/prefixes", list[PrefixReport], of_prefixes)
    return View(
        client.get("/admin/v1/usage", Usage, params),
        client.get("/admin/v1/savings", Savings, params),
        by_worth(prefixes),
        client.get("/admin/v1/usage/groups", list[Group], {**params, "group_by": "model"}),
        client.get("/admin/v1/usage/groups", list[Group], {**params, "group_by": "workspace"}),
        first_words(client, (prefix.look for prefix in by_worth(prefixes))),
    )


def by_worth(prefixes: Sequence[PrefixReport]) -> list[PrefixReport]:
    """What saved most comes first."""
    return sorted(prefixes, key=lambda prefix: prefix.saved_nano or 0, reverse=True)


def draw(view: View, chosen: Selection) -> None:
    totals = view.usage.totals
    if not totals.requests:
        parts.hero(f"**Nothing was asked** in {chosen.words}, so nothing was saved.")
        parts.empty(
            "No requests in this range. What they save appears here within seconds.", key="savings"
        )
        return
    draw_cards(view, chosen)
    parts.placeholder_prices()
    if totals.unpriced:
        st.warning(
            f"{totals.unpriced:,} of {formats.counted(totals.requests, 'request')}"
            f" {'has' if totals.unpriced == 1 else 'have'} no price. Their tokens"
            " count, their money is unknown and in no sum.",
            icon=":material/sell:",
        )
    if totals.is_priced:
        draw_money(view)
    draw_prefixes(view, chosen.model)
    for by, groups in (("model", view.models), ("workspace", view.workspaces)):
        parts.heading(f"By {by}")
        rows = group_table(groups, by, by.capitalize())
        parts.table(rows, f"by_{by}", f"Usage of {len(groups)} {by}s.")
    rows = [
        {
            "Model": hosted.model,
            "This traffic ($)": hosted.nano / NANO,
            "Without caching ($)": hosted.nano_without_cache / NANO,
            "Prices as of": hosted.as_of,
            "Source": hosted.source,
        }
        for hosted in view.savings.hosted
    ]
    parts.section(
        "The same traffic at published prices",
        rows,
        "hosted",
        "What this traffic would cost at published prices.",
        number="hosted",
        none="There are no published prices to compare with.",
        icon=":material/sell:",
    )


def draw_cards(view: View, chosen: Selection) -> None:
    waterfall = view.savings.own
    seconds = view.savings.prefill_seconds_avoided
    priced = view.usage.totals.is_priced
    time = parts.time_spared(view.savings)
    spared = "" if time is None else f"**{time}** and "
    if not priced:
        parts.hero("No request in this range has a price: what was saved is unknown in money.")
    elif waterfall.saved_nano < 0:
        lost = dollars(-waterfall.saved_nano)
        parts.hero(f"Caching cost **{lost} more than it saved** in {chosen.words}.")
    else:
        parts.hero(f"Caching saved {spared}**{dollars(waterfall.saved_nano)}** in {chosen.words}.")
    with st.grid(6, min_column_width=160):
        note = parts.tokens_spared(view.savings)
        parts.card("prefill_seconds_avoided", formats.seconds(seconds), delta=note)
        whole = waterfall.counterfactual_nano
        parts.money_card(
            "saved_nano",
            waterfall.saved_nano if priced else None,
            delta=cheaper_by(waterfall.saved_nano, whole),
            is_good=waterfall.saved_nano >= 0 if priced else None,
        )
        for part in ("counterfactual", "write_premium", "read_discount", "actual"):
            number = f"{part}_nano"
            parts.card(number, dollars(getattr(waterfall, number) if priced else None))


def cheaper_by(saved_nano: int, whole_nano: int) -> str | None:
    """What is saved as a share of the cost without a cache; None where there was no cost."""
    if not whole_nano:
        return None
    share = formats.percent(abs(saved_nano) / whole_nano)
    return f"{share} {'more' if saved_nano < 0 else 'less'} than without"


def draw_money(view: View) -> None:
    usage = view.usage
    theme = viewer.theme()
    left, right = st.columns(2, gap="large")
    with left:
        parts.heading("From no cache to what it cost", "actual_nano")
        draw_waterfall(view.savings.own)
    with right:
        parts.heading("Net saved over time", "saved_nano")
        if not any(bucket.saved_nano for bucket in usage.series):
            parts.empty("Nothing was saved or lost: no prompt was written or read.")
            return
        drawn = bars_over_time(
            saved_over_time(usage),
            {name: MONEY[theme][name] for name in ("Saved", "Lost")},
            title=f"Dollars {per_bucket(usage.bucket_seconds)}",
            x=time_axis(usage),
            unit="$",
            height=CHART_HEIGHT,
        )
        alt_text = f"Net saved over time, {dollars(usage.saved_nano)} in all."
        parts.chart(drawn, "saved_over_time", alt_text)


def saved_over_time(usage: Usage) -> list[Row]:
    """Dollars for each interval; a loss is negative, and called so."""
    return [
        {
            **row,
            "class": "Lost" if bucket.saved_nano < 0 else "Saved",
            "bottom": 0,
            "top": bucket.saved_nano / NANO,
            "said": dollars(bucket.saved_nano),
        }
        for bucket, row in intervals(usage)
    ]


def draw_waterfall(waterfall: Waterfall) -> None:
    if not waterfall.counterfactual_nano:
        parts.empty("Nothing was charged: no request in this range computed or read a token.")
        return
    rows = waterfall_rows(waterfall)
    theme = viewer.theme()
    x = alt.X(
        "step:N",
        sort=[row["step"] for row in rows],
        title=None,
        scale=alt.Scale(paddingInner=0.3, paddingOuter=0.15),
        axis=alt.Axis(labelAngle=0, grid=False, labelExpr=_LAST_WORD_BELOW, labelLimit=120),
    )
    bars = (
        alt.Chart(charts.frame([row for row in rows if row["amount"]]))
        .mark_bar(cornerRadius=2)
        .encode(
            x=x,
            y=alt.Y("bottom:Q", title="Dollars", scale=charts.ZERO, axis=charts.amounts("$")),
            y2=alt.Y2("top:Q"),
            color=charts.colour("class:N", MONEY[theme], sort=None),
            tooltip=charts.tips("step:N=Step", "label:N=Amount"),
        )
    )
    labels = (
        alt.Chart(charts.frame(rows))
        .mark_text(dy=-8, fontSize=13, fontWeight=600, color=TEXT[theme])
        .encode(x=x, y=alt.Y("top:Q"), text=alt.Text("label:N"))
    )
    parts.chart(
        alt.layer(bars, labels).properties(height=CHART_HEIGHT),
        "waterfall",
        f"Without a cache {dollars(waterfall.counterfactual_nano)}, plus write premium"
        f" {dollars(waterfall.write_premium_nano)}, less read discount"
        f" {dollars(waterfall.read_discount_nano)}, is {dollars(waterfall.actual_nano)}.",
    )
    if waterfall.undelivered:
        st.caption(
            f"{formats.counted(waterfall.undelivered, 'request')} ended with an error in place of"
            " an answer: not delivered, so not charged and not in this chart."
        )
    if waterfall.unexplained:
        st.caption(
            f"{formats.counted(waterfall.unexplained, 'request')} without a price, or whose price"
            " is no longer in the file,"
            f" {'is' if waterfall.unexplained == 1 else 'are'} not in this chart."
        )


def waterfall_rows(waterfall: Waterfall) -> list[Row]:
    """Four bars in dollars, from `bottom` to `top`: two that stand, two that hang between them."""
    without = waterfall.counterfactual_nano
    premium = waterfall.write_premium_nano
    discount = waterfall.read_discount_nano
    actual = waterfall.actual_nano
    high = without + premium
    return [
        {
            "step": step,
            "class": kind,
            "bottom": min(first, last) / NANO,
            "top": max(first, last) / NANO,
            "amount": amount / NANO,
            "label": dollars(amount),
        }
        for step, kind, first, last, amount in (
            ("Without a cache", "Cost", 0, without, without),
            ("Write premium", "Lost", without, high, premium),
            ("Read discount", "Saved", high, high - discount, -discount),
            ("Actual cost", "Cost", 0, actual, actual),
        )
    ]


def draw_prefixes(view: View, model: str | None) -> None:
    """`model` is the one that was chosen, None where all are."""
    prefixes = view.prefixes
    parts.heading("Has each prefix paid for its writes?", "better_ttl")
    # A conversation that grows marks a longer prefix each turn, and reads the one before.
    workspaces = {prefix.workspace for prefix in prefixes}
    blank = dict.fromkeys(prefix_table(prefixes)[0]) if prefixes else {}
    rest = [
        {
            **blank,
            "Prefix": "growing conversations",
            "Workspace": group.workspace,
            "Paid back": "yes" if group.saved_nano > 0 else "not yet",
            "Net ($)": group.saved_nano / NANO,
            "Requests": group.totals.requests,
            "With a read": group.totals.requests_with_read,
        }
        for group in view.workspaces
        if group.saved_nano and group.workspace not in workspaces
    ]
    if not prefixes and not rest:
        parts.empty(
            "No marked prefix has come twice in this range.", ":material/repeat:", key="prefixes"
        )
        return
    paid = sum(prefix.is_paid_back is True for prefix in prefixes)
    gains = [prefix.better_ttl_saves_nano or 0 for prefix in prefixes]
    wrong = sum(gain > 0 for gain in gains)
    mixed = sum(len(prefix.models) > 1 for prefix in prefixes)
    unjudged = sum(
        len(prefix.models) < 2 and prefix.ttl is not None and prefix.ttl not in JUDGED_TTLS
        for prefix in prefixes
    )
    st.caption(
        f"{paid:,} of {len(prefixes):,} have paid back. {wrong:,} would be cheaper with the"
        f" other TTL, by {dollars(sum(gains))} in all, judged by the gaps between their own"
        " requests. Whole life of each prefix, of all engines; what saved most first."
        + (
            f" {formats.counted(mixed, 'prefix is', 'prefixes are')} of several models, one row for"
            " all of them: no TTL is judged there, since each model holds the prefix for itself."
            if mixed
            else ""
        )
        + (" Their sums are of all their models, not of the chosen one." if mixed and model else "")
        + (
            f" Of {formats.counted(unjudged, 'prefix', 'prefixes')} with another TTL than"
            f" {' and '.join(JUDGED_TTLS)} none is judged."
            if unjudged
            else ""
        )
        + (
            " A conversation that grows has a new prefix each turn: workspaces with nothing else"
            " stand last, with what they saved in this range."
            if rest
            else ""
        )
    )
    rows = [*prefix_table(prefixes, view.words), *rest]
    parts.table(
        rows,
        "prefixes",
        f"{formats.counted(len(prefixes), 'prefix', 'prefixes')}, {paid} of them paid back.",
    )


def prefix_table(
    prefixes: Sequence[PrefixReport], words: Mapping[str, str] = NO_WORDS
) -> list[Row]:
    return [
        {
            "Prefix": prefix_label(prefix.look, prefix.prefix, words) if prefix.look else DELETED,
            "Net ($)": in_dollars(prefix.saved_nano),
            parts.READS_PER_WRITE: reads_per_write(prefix),
            "TTL": prefix.ttl,
            "Cheaper TTL": prefix.better_ttl,
            "It would save ($)": in_dollars(prefix.better_ttl_saves_nano or None),
            parts.REQUESTS_OF: parts.requests_of(prefix.prefix, prefix.workspace),
            "Workspace": prefix.workspace,
            "Model": models_of(prefix),
            "Client": prefix.look.user_agent if prefix.look else None,
            "Last used (UTC)": formats.moment(prefix.look.last_ms) if prefix.look else None,
            "Paid back": {None: None, True: "yes", False: "not yet"}[prefix.is_paid_back],
            "Requests": prefix.requests,
            "With a read": prefix.requests_with_read,
            "Pays back after (reads)": prefix.reads_to_pay_back,
            "Gaps up to 5 min": prefix.gaps_5m,
            "Gaps 5 min to 1 h": prefix.gaps_1h,
            "Longer gaps": max(prefix.requests - 1 - prefix.gaps_5m - prefix.gaps_1h, 0),
            "Tokens": (prefix.look.tokens or None) if prefix.look else None,
            "Last request": prefix.look.last_turn if prefix.look else None,
            "Prefix id": prefix.prefix,
        }
        for prefix in prefixes
    ]


def models_of(prefix: PrefixReport) -> str:
    """Its model, or two of them, which one row is of."""
    return prefix.model if len(prefix.models) < 2 else " and ".join(prefix.models)


DELETED = "its requests were deleted"
NUM_DIGITS = 6
"""Of a digest: enough to tell the prefixes of one page apart."""


def reads_per_write(prefix: PrefixReport) -> float | None:
    """What each written token was read, in tokens; None where nothing was written."""
    written = prefix.written_tokens
    return round(prefix.cache_read_tokens / written, 2) if written else None


def first_words(client: AdminClient, looks: Iterable[PrefixLook | None]) -> dict[str, str]:
    """By its last request, the first words of each prefix without a name whose workspace keeps
    contents, for a viewer who may read them; of the first `NUM_WORDS`. Raise ClientError."""
    if viewer.is_admin() and not viewer.may_change():
        return {}
    turns = [look.last_turn for look in looks if look and not look.name and look.content == KEPT]
    words: dict[str, str] = {}
    for turn_id in list(dict.fromkeys(turns))[:NUM_WORDS]:
        path = f"/admin/v1/turns/{segment(turn_id)}/content/beginning"
        with suppress(NotThere):  # it was deleted, or is on its way to the database
            words[turn_id] = client.get(path, TurnBeginning, kept_seconds=WORDS_SECONDS).text
    return words


def held_label(look: PrefixLook | None, tokens: int, digest: str, words: Mapping[str, str]) -> str:
    """What a person can tell an entry by: as `prefix_label`, or by its size where no request of the
    ledger ended with it."""
    if look is not None:
        return prefix_label(look, digest, words)
    return f"{formats.counted(tokens, 'token')} · {digest[:NUM_DIGITS]}"


def prefix_label(look: PrefixLook, digest: str = "", words: Mapping[str, str] = NO_WORDS) -> str:
    """What a person can tell a prefix by: its name, or else its first words, or else how many
    blocks of each kind it has; behind these stands the start of its digest."""
    if look.name:
        return look.name
    beginning = words.get(look.last_turn)
    if beginning:
        return " · ".join(filter(None, (beginning, digest[:NUM_DIGITS])))
    kinds = {"tool": look.num_tools, "system block": look.num_system}
    kinds["message block"] = look.num_messages
    counted = [formats.counted(count, kind) for kind, count in kinds.items() if count]
    if look.tokens:
        counted.append(formats.counted(look.tokens, "token"))
    if digest:
        counted.append(digest[:NUM_DIGITS])
    return " · ".join(counted) or "a prompt that its client did not name"


def group_table(groups: Sequence[Group], by: str, title: str) -> list[Row]:
    """One row for each value of a dimension, with its tokens by class, hit rate and money."""
    ttls = formats.ttls_written(group.totals.writes for group in groups)
    return [
        {
            title: getattr(group, by),
            "Net saved ($)": group.saved_nano / NANO if group.totals.is_priced else None,
            "Cost ($)": group.totals.cost_nano / NANO if group.totals.is_priced else None,
            "Hit rate": group.rates.token_hit_rate,
            "Requests": group.totals.requests,
            "Failed": group.totals.errors,
            "Read (tokens)": group.totals.cache_read_tokens,
            **{f"Written {ttl} (tokens)": group.totals.writes[ttl] for ttl in ttls},
            "Reused automatically (tokens)": group.totals.automatic_input_tokens,
            "Computed, not written (tokens)": group.totals.computed_input_tokens,
            "Output (tokens)": group.totals.output_tokens,
        }
        for group in groups
    ]


if __name__ == "__main__":
    parts.title("Savings", "What does caching save, and where does it cost?")
    live.show("savings", read, draw)
