"""Savings: what does caching save, where does it cost, and would the other TTL be cheaper?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import altair as alt
import streamlit as st

from dashboard.client import AdminClient
from dashboard.ui import charts, formats, live, parts, viewer
from dashboard.ui.charts import CHART_HEIGHT, MONEY, TEXT, Row, bars_over_time, per_bucket
from dashboard.ui.filters import Selection
from dashboard.ui.formats import NANO, dollars
from dashboard.ui.parts import in_dollars
from dashboard.ui.prefix_labels import NO_WORDS, first_words, prefix_label
from dashboard.views.overview import intervals, time_axis
from gateway.structs.usage import JUDGED_TTLS, Group, PrefixReport, Savings, Usage, Waterfall

NUM_PREFIXES = 100
DELETED = "its requests were deleted"
"""The label of a prefix of which the ledger has only sums."""
_LAST_SPACE = "lastindexof(datum.label, ' ')"
_LAST_WORD_BELOW = f"[slice(datum.label, 0, {_LAST_SPACE}), slice(datum.label, {_LAST_SPACE} + 1)]"
"""The label of an axis in two lines. The second line has the last word."""


class View(NamedTuple):
    """What the page shows."""

    usage: Usage
    savings: Savings
    # The prefixes that saved most come first.
    prefixes: list[PrefixReport]
    # The usage of each model.
    models: list[Group]
    # The usage of each workspace.
    workspaces: list[Group]
    # The first words of prefixes, by the id of their last request.
    words: Mapping[str, str]


def read(client: AdminClient, selection: Selection) -> View:
    params = selection.params()
    query = {**selection.params("engine"), "limit": NUM_PREFIXES}
    prefixes = by_savings(client.get("/admin/v1/prefixes", list[PrefixReport], query))
    return View(
        client.get("/admin/v1/usage", Usage, params),
        client.get("/admin/v1/savings", Savings, params),
        prefixes,
        client.get("/admin/v1/usage/groups", list[Group], {**params, "group_by": "model"}),
        client.get("/admin/v1/usage/groups", list[Group], {**params, "group_by": "workspace"}),
        first_words(client, (prefix.look for prefix in prefixes)),
    )


def by_savings(prefixes: Sequence[PrefixReport]) -> list[PrefixReport]:
    """The prefixes, those that saved most first."""
    return sorted(prefixes, key=lambda prefix: prefix.saved_nano or 0, reverse=True)


def draw(view: View, selection: Selection) -> None:
    totals = view.usage.totals
    if not totals.requests:
        parts.hero(f"**Nothing was asked** in {selection.words}, so nothing was saved.")
        parts.empty(
            "No requests in this range. What they save appears here within seconds.", key="savings"
        )
        return
    draw_cards(view, selection)
    parts.placeholder_prices()
    if totals.unpriced:
        st.warning(
            f"{totals.unpriced:,} of {formats.counted(totals.requests, 'request')}"
            f" {'has' if totals.unpriced == 1 else 'have'} no price. Their tokens count. Their cost"
            " is unknown, and in no sum of money.",
            icon=":material/sell:",
        )
    if totals.is_priced:
        draw_money(view)
    draw_prefixes(view, selection.model)
    draw_groups(view.models, "model")
    draw_groups(view.workspaces, "workspace")
    draw_hosted(view.savings)


def draw_groups(groups: Sequence[Group], by: str) -> None:
    """Draw the usage of each model or of each workspace. `by` is `model` or `workspace`."""
    parts.heading(f"By {by}")
    rows = group_table(groups, by, by.capitalize())
    parts.table(rows, f"by_{by}", f"Usage of {len(groups)} {by}s.")


def draw_hosted(savings: Savings) -> None:
    """Draw what the same traffic would have cost at the published prices of hosted models."""
    rows = [
        {
            "Model": hosted.model,
            "This traffic ($)": hosted.nano / NANO,
            "Without caching ($)": hosted.nano_without_cache / NANO,
            "Prices as of": hosted.as_of,
            "Source": hosted.source,
        }
        for hosted in savings.hosted
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


def draw_cards(view: View, selection: Selection) -> None:
    waterfall = view.savings.own
    seconds = view.savings.prefill_seconds_avoided
    is_priced = view.usage.totals.is_priced
    prefill_time = parts.time_spared(view.savings)
    time_and = "" if prefill_time is None else f"**{prefill_time}** and "
    if not is_priced:
        parts.hero("No request in this range has a price: what was saved is unknown in money.")
    elif waterfall.saved_nano < 0:
        lost = dollars(-waterfall.saved_nano)
        parts.hero(f"Caching cost **{lost} more than it saved** in {selection.words}.")
    else:
        saved = dollars(waterfall.saved_nano)
        parts.hero(f"Caching saved {time_and}**{saved}** in {selection.words}.")
    with st.grid(6, min_column_width=160):
        note = parts.tokens_spared(view.savings)
        parts.card("prefill_seconds_avoided", formats.seconds(seconds), delta=note)
        parts.money_card(
            "saved_nano",
            waterfall.saved_nano if is_priced else None,
            delta=cheaper_by(waterfall.saved_nano, waterfall.counterfactual_nano),
            is_good=waterfall.saved_nano >= 0 if is_priced else None,
        )
        for part in ("counterfactual", "write_premium", "read_discount", "actual"):
            number = f"{part}_nano"
            parts.card(number, dollars(getattr(waterfall, number) if is_priced else None))


def cheaper_by(saved_nano: int, counterfactual_nano: int) -> str | None:
    """What was saved, as a share of the cost without a cache; None if there was no cost."""
    if not counterfactual_nano:
        return None
    share = formats.percent(abs(saved_nano) / counterfactual_nano)
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
    """The dollars saved in each interval. A loss is negative, and its class is `Lost`."""
    return [
        {
            **row,
            "class": "Lost" if bucket.saved_nano < 0 else "Saved",
            "bottom": 0,
            "top": bucket.saved_nano / NANO,
            "words": dollars(bucket.saved_nano),
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
            " an answer. What was not delivered is not charged, and not in this chart."
        )
    if waterfall.unexplained:
        st.caption(
            f"{formats.counted(waterfall.unexplained, 'request')} without a price, or whose price"
            " is no longer in the file,"
            f" {'is' if waterfall.unexplained == 1 else 'are'} not in this chart."
        )


def waterfall_rows(waterfall: Waterfall) -> list[Row]:
    """Four bars, in dollars. The first and the last bar stand on 0. The two bars between them show
    what leads from the first to the last."""
    without = waterfall.counterfactual_nano
    premium = waterfall.write_premium_nano
    discount = waterfall.read_discount_nano
    actual = waterfall.actual_nano
    return [
        _bar("Without a cache", "Cost", 0, without),
        _bar("Write premium", "Lost", without, premium),
        _bar("Read discount", "Saved", without + premium, -discount),
        _bar("Actual cost", "Cost", 0, actual),
    ]


def _bar(step: str, kind: str, start_nano: int, amount_nano: int) -> Row:
    """A bar that begins at `start_nano`. A negative amount hangs down from there."""
    end_nano = start_nano + amount_nano
    return {
        "step": step,
        "class": kind,
        "bottom": min(start_nano, end_nano) / NANO,
        "top": max(start_nano, end_nano) / NANO,
        "amount": amount_nano / NANO,
        "label": dollars(amount_nano),
    }


def draw_prefixes(view: View, model: str | None) -> None:
    """Draw the table of prefixes. `model` is the chosen model; None if none is chosen."""
    prefixes = view.prefixes
    parts.heading("Has each prefix paid for its writes?", "better_ttl")
    growing = growing_rows(view)
    if not prefixes and not growing:
        parts.empty(
            "No marked prefix has come twice in this range.", ":material/repeat:", key="prefixes"
        )
        return
    num_paid = sum(prefix.is_paid_back is True for prefix in prefixes)
    notes = prefix_notes(prefixes, model)
    if growing:
        notes.append(
            "A conversation that grows has a new prefix with each turn. Workspaces that have only"
            " such conversations stand last, with what they saved in this range."
        )
    st.caption(" ".join(notes))
    rows = [*prefix_table(prefixes, view.words), *growing]
    count = formats.counted(len(prefixes), "prefix", "prefixes")
    parts.table(rows, "prefixes", f"{count}, {num_paid} of them paid back.")


def growing_rows(view: View) -> list[Row]:
    """A row for each workspace that saved or lost money and has no prefix in the table. In a
    conversation that grows, each turn marks a longer prefix and reads the prefix of the turn before
    it."""
    listed = {prefix.workspace for prefix in view.prefixes}
    blank = dict.fromkeys(prefix_table(view.prefixes)[0]) if view.prefixes else {}
    return [
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
        if group.saved_nano and group.workspace not in listed
    ]


def prefix_notes(prefixes: Sequence[PrefixReport], model: str | None) -> list[str]:
    """The sentences above the table. They say what is judged, and what is not."""
    num_paid = sum(prefix.is_paid_back is True for prefix in prefixes)
    gains = [prefix.better_ttl_saves_nano or 0 for prefix in prefixes]
    num_cheaper = sum(gain > 0 for gain in gains)
    num_mixed = sum(len(prefix.models) > 1 for prefix in prefixes)
    num_unjudged = sum(
        len(prefix.models) < 2 and prefix.ttl is not None and prefix.ttl not in JUDGED_TTLS
        for prefix in prefixes
    )
    notes = [
        f"{num_paid:,} of {len(prefixes):,} have paid back. {num_cheaper:,} would be cheaper with"
        f" the other TTL, by {dollars(sum(gains))} in all, judged by the gaps between their own"
        " requests. Each row is about the whole life of a prefix, on all engines. What saved most"
        " comes first."
    ]
    if num_mixed:
        notes.append(
            f"{formats.counted(num_mixed, 'prefix is', 'prefixes are')} of several models, which"
            " share a row. No TTL is judged there, because each model holds the prefix for itself."
        )
    if num_mixed and model:
        notes.append("The sums of such a row are of all its models, not of the chosen one.")
    if num_unjudged:
        notes.append(
            f"{formats.counted(num_unjudged, 'prefix has', 'prefixes have')} another TTL than"
            f" {' and '.join(JUDGED_TTLS)}, which can't be judged."
        )
    return notes


def prefix_table(
    prefixes: Sequence[PrefixReport], words: Mapping[str, str] = NO_WORDS
) -> list[Row]:
    return [_prefix_row(prefix, words) for prefix in prefixes]


def _prefix_row(prefix: PrefixReport, words: Mapping[str, str]) -> Row:
    look = prefix.look
    return {
        "Prefix": prefix_label(look, prefix.prefix, words) if look else DELETED,
        "Net ($)": in_dollars(prefix.saved_nano),
        parts.READS_PER_WRITE: reads_per_write(prefix),
        "TTL": prefix.ttl,
        "Cheaper TTL": prefix.better_ttl,
        "It would save ($)": in_dollars(prefix.better_ttl_saves_nano or None),
        parts.REQUESTS_OF: parts.requests_of(prefix.prefix, prefix.workspace),
        "Workspace": prefix.workspace,
        "Model": models_of(prefix),
        "Client": look.user_agent if look else None,
        "Last used (UTC)": formats.moment(look.last_ms) if look else None,
        "Paid back": paid_back_in_words(prefix.is_paid_back),
        "Requests": prefix.requests,
        "With a read": prefix.requests_with_read,
        "Pays back after (reads)": prefix.reads_to_pay_back,
        "Gaps up to 5 min": prefix.gaps_5m,
        "Gaps 5 min to 1 h": prefix.gaps_1h,
        "Longer gaps": max(prefix.requests - 1 - prefix.gaps_5m - prefix.gaps_1h, 0),
        "Tokens": (look.tokens or None) if look else None,
        "Last request": look.last_turn if look else None,
        "Prefix id": prefix.prefix,
    }


def paid_back_in_words(is_paid_back: bool | None) -> str | None:
    if is_paid_back is None:
        return None
    return "yes" if is_paid_back else "not yet"


def models_of(prefix: PrefixReport) -> str:
    """The prefix's model. If the row is about several models, the names of two of them."""
    return prefix.model if len(prefix.models) < 2 else " and ".join(prefix.models)


def reads_per_write(prefix: PrefixReport) -> float | None:
    """The tokens read for each token written; None if no token was written."""
    written_tokens = prefix.written_tokens
    return round(prefix.cache_read_tokens / written_tokens, 2) if written_tokens else None


def group_table(groups: Sequence[Group], by: str, title: str) -> list[Row]:
    """One row for each value of the dimension `by`, with its tokens by class, hit rate and money.
    `title` is the title of the column of values."""
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
