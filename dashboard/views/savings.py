"""Savings: what does caching save, where does it cost, and would the other TTL be cheaper?"""

from dataclasses import dataclass

import streamlit as st

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.savings import PrefixReport, Savings, Waterfall
from dashboard.admin.shapes.usage import Group, Usage
from dashboard.charts.axes import times
from dashboard.charts.money import waterfall_chart
from dashboard.charts.time import per_bucket, signed_over_time
from dashboard.rows.savings import growing_table, hosted_table, prefix_table, waterfall_rows
from dashboard.rows.usage import group_table, saved_over_time
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.colours import MONEY, TEXT, Theme
from dashboard.ui.selection import Selection

NUM_PREFIXES = 100


@dataclass(frozen=True, slots=True)
class View:
    usage: Usage
    savings: Savings
    prefixes: list[PrefixReport]
    models: list[Group]
    workspaces: list[Group]


def read(client: AdminClient, chosen: Selection) -> View:
    params = chosen.params()
    of_prefixes = {name: value for name, value in params.items() if name != "engine"}
    return View(
        client.get("/admin/v1/usage", Usage, params),
        client.get("/admin/v1/savings", Savings, params),
        client.get(
            "/admin/v1/prefixes", list[PrefixReport], {**of_prefixes, "limit": NUM_PREFIXES}
        ),
        client.get("/admin/v1/usage/groups", list[Group], {**params, "group_by": "model"}),
        client.get("/admin/v1/usage/groups", list[Group], {**params, "group_by": "workspace"}),
    )


def draw(view: View, chosen: Selection) -> None:
    totals = view.usage.totals
    if not totals.requests:
        parts.hero(f"**Nothing was asked** in {chosen.words}, so nothing was saved.")
        parts.empty(
            "No requests in this range. What they save appears here within seconds.", key="savings"
        )
        return
    draw_hero(view, chosen)
    draw_cards(view)
    parts.placeholder_prices()
    if totals.unpriced:
        st.warning(
            f"{totals.unpriced:,} of {totals.requests:,} requests have no price. Their tokens"
            " count, their money is unknown and in no sum.",
            icon=":material/sell:",
        )
    if totals.is_priced:
        draw_money(view)
    draw_prefixes(view)
    draw_comparisons(view)


def draw_hero(view: View, chosen: Selection) -> None:
    own, totals = view.savings.own, view.usage.totals
    hours = view.savings.gpu_hours_avoided
    spared = "" if hours is None else f"**{formats.seconds(hours * 3600)} of GPU time** and "
    if not totals.is_priced:
        parts.hero("No request in this range has a price: what was saved is unknown in money.")
        return
    if own.saved_nano < 0:
        lost = formats.dollars(-own.saved_nano)
        parts.hero(f"Caching cost **{lost} more than it saved** in {chosen.words}.")
        return
    parts.hero(f"Caching saved {spared}**{formats.dollars(own.saved_nano)}** in {chosen.words}.")


def draw_cards(view: View) -> None:
    own, totals = view.savings.own, view.usage.totals
    priced = totals.is_priced
    with st.grid(6, min_column_width=160, row_height=120):
        parts.card(
            "prefill_seconds_avoided",
            formats.seconds(view.savings.prefill_seconds_avoided),
            delta=f"{formats.compact(view.savings.prefill_tokens_avoided)} tokens read",
        )
        parts.card(
            "saved_nano",
            formats.dollars(own.saved_nano if priced else None),
            delta=f"{formats.percent(own.saved_nano / own.counterfactual_nano)} of the cost"
            if own.counterfactual_nano
            else None,
            is_good=own.saved_nano >= 0 if priced else None,
            is_loss=own.saved_nano < 0,
        )
        for number, nano in (
            ("counterfactual_nano", own.counterfactual_nano),
            ("write_premium_nano", own.write_premium_nano),
            ("read_discount_nano", own.read_discount_nano),
            ("actual_nano", own.actual_nano),
        ):
            parts.card(number, formats.dollars(nano if priced else None))


def draw_money(view: View) -> None:
    own, usage = view.savings.own, view.usage
    theme = viewer.theme()
    left, right = st.columns(2, gap="large")
    with left:
        parts.heading("From no cache to what it cost", "actual_nano")
        if own.counterfactual_nano:
            draw_waterfall(own, theme)
        else:
            parts.empty("Nothing was charged: no request in this range computed or read a token.")
    with right:
        parts.heading("Net saved over time", "saved_nano")
        if not any(bucket.saved_nano for bucket in usage.series):
            parts.empty("Nothing was saved or lost: no prompt was written or read.")
            return
        parts.chart(
            signed_over_time(
                saved_over_time(usage),
                MONEY[theme],
                title=f"Dollars {per_bucket(usage.bucket_seconds)}",
                span=times(usage.since_ms, usage.until_ms),
            ),
            "saved_over_time",
            f"Net saved over time, {formats.dollars(usage.saved_nano)} in all.",
        )


def draw_waterfall(own: Waterfall, theme: Theme) -> None:
    parts.chart(
        waterfall_chart(waterfall_rows(own), MONEY[theme], TEXT[theme]),
        "waterfall",
        f"Without a cache {formats.dollars(own.counterfactual_nano)}, plus write premium"
        f" {formats.dollars(own.write_premium_nano)}, less read discount"
        f" {formats.dollars(own.read_discount_nano)}, is {formats.dollars(own.actual_nano)}.",
    )
    if own.unexplained:
        st.caption(
            f"{own.unexplained:,} requests without a price, or whose price is no longer in"
            " the file, are not in this chart."
        )


def draw_prefixes(view: View) -> None:
    prefixes = view.prefixes
    parts.heading("Has each prefix paid for its writes?", "better_ttl")
    rest = growing_table(view.workspaces, prefixes)
    if not prefixes and not rest:
        parts.empty(
            "No marked prefix has come twice in this range.", ":material/repeat:", key="prefixes"
        )
        return
    paid = sum(each.is_paid_back is True for each in prefixes)
    wrong = [each for each in prefixes if (each.better_ttl_saves_nano or 0) > 0]
    gain = sum(each.better_ttl_saves_nano or 0 for each in wrong)
    st.caption(
        f"{paid:,} of {len(prefixes):,} have paid back. {len(wrong):,} would be cheaper with the"
        f" other TTL, by {formats.dollars(gain)} together, judged by the gaps between their own"
        " requests. Whole life of each prefix, of all engines; the most used first."
        + (
            " A conversation that grows has a new prefix each turn: workspaces with nothing else"
            " stand last, with what they saved in this range."
            if rest
            else ""
        )
    )
    parts.table(
        [*prefix_table(prefixes), *rest],
        "prefixes",
        alt_text=f"{len(prefixes)} prefixes, {paid} of them paid back.",
        columns={
            "Net ($)": parts.money_column(),
            "It would save ($)": parts.money_column(),
            "Last used (UTC)": parts.moment_column(),
        },
        height=420 if len(prefixes) + len(rest) > 10 else "auto",
    )


def draw_comparisons(view: View) -> None:
    money, share = parts.money_column(), parts.share_column()
    for by, found in (("model", view.models), ("workspace", view.workspaces)):
        parts.heading(f"By {by}")
        parts.table(
            group_table(found, by, by.capitalize()),
            f"by_{by}",
            alt_text=f"Usage of {len(found)} {by}s.",
            columns={"Hit rate": share, "Cost ($)": money, "Net saved ($)": money},
            height=420 if len(found) > 10 else "auto",
        )
    parts.heading("The same traffic at published prices", "hosted")
    if not view.savings.hosted:
        parts.empty("There are no published prices to compare with.", ":material/sell:")
        return
    parts.table(
        hosted_table(view.savings.hosted),
        "hosted",
        alt_text="What this traffic would cost at published prices.",
        columns={"This traffic ($)": money, "Without caching ($)": money},
    )


parts.title("Savings", "What does caching save, and where does it cost?")
live.show("savings", read, draw)
