"""What knows no browser and no gateway: selections, rows, CSV, colours, advice."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import get_args

import pytest
from msgspec import structs

from dashboard.admin.shapes.savings import Waterfall
from dashboard.admin.shapes.usage import Bucket, HitRates, Totals, Usage
from dashboard.rows.savings import waterfall_rows
from dashboard.rows.usage import hit_rates, saved_over_time, tokens_by_class
from dashboard.ui.advice import ADVICE, UNKNOWN, advice
from dashboard.ui.colours import BLOCKS, HITS, MONEY, TOKENS, Theme
from dashboard.ui.parts import as_csv
from dashboard.ui.selection import RANGES, Selection
from dashboard.views.catalogue import entries
from engine.protocol import MissReason
from gateway.admin.structs.usage import DivergenceKind

NOW = datetime(2026, 11, 21, 12, 0, 3, tzinfo=UTC)


@pytest.mark.parametrize("chosen", RANGES)
def test_a_range_ends_after_now_at_a_time_that_all_share(chosen: str) -> None:
    selection = Selection(range=chosen)
    since, until = selection.span(NOW)
    assert (until - since).total_seconds() == RANGES[chosen]
    assert NOW < until <= NOW + timedelta(seconds=selection.refresh_seconds)
    assert selection.span(NOW + timedelta(seconds=1)) == (since, until)


def test_a_custom_range_is_what_was_chosen_and_never_empty() -> None:
    since = NOW - timedelta(hours=2)
    assert Selection(range="custom", since=since, until=NOW).span(NOW) == (since, NOW)
    turned = Selection(range="custom", since=NOW, until=since).span(NOW)
    assert turned == (NOW, NOW + timedelta(minutes=1))


def usage(*savings: int) -> Usage:
    """Buckets of an hour, the first and the last cut by the range."""
    series = [
        Bucket(
            start_ms=hour * 3_600_000,
            totals=Totals(requests=1, cache_read_tokens=3, input_tokens=1),
            saved_nano=saved,
            is_partial=hour in (0, len(savings) - 1),
        )
        for hour, saved in enumerate(savings)
    ]
    return Usage(
        since_ms=1_800_000,
        until_ms=len(savings) * 3_600_000 - 600_000,
        bucket_seconds=3600,
        totals=Totals(),
        rates=HitRates(),
        saved_nano=sum(savings),
        before=Totals(),
        rates_before=HitRates(),
        saved_nano_before=0,
        series=series,
        miss_reasons={},
        outcomes={},
    )


@pytest.mark.parametrize(
    ("now", "before", "is_comparable"),
    [
        (30_000, 2, False),
        (30_000, 2_999, False),
        (30_000, 3_000, True),
        (3, 40, True),
        (0, 20, True),
        (3, 19, False),
        (0, 0, False),
    ],
)
def test_a_period_with_hardly_any_requests_is_none_to_compare_with(
    now: int, before: int, is_comparable: bool
) -> None:
    seen = structs.replace(usage(), totals=Totals(requests=now), before=Totals(requests=before))
    assert seen.is_comparable is is_comparable


def test_intervals_that_the_range_cuts_are_drawn_as_wide_as_they_are() -> None:
    drawn = saved_over_time(usage(5, -2, 1))
    assert drawn[0]["start"].minute == 30 and drawn[-1]["end"].minute == 50
    assert [row["part"] != "" for row in drawn] == [True, False, True]
    assert [row["class"] for row in drawn] == ["Saved", "Lost", "Saved"]


def test_classes_are_stacked_without_a_gap() -> None:
    drawn = [row for row in tokens_by_class(usage(0)) if row["start"].hour == 0]
    assert [row["class"] for row in drawn] == list(TOKENS["light"])
    assert all(below["top"] == above["bottom"] for below, above in pairwise(drawn))
    assert drawn[-1]["top"] == 4


def test_sparklines_leave_cut_intervals_out() -> None:
    assert hit_rates(usage(1, 1, 1, 1).series) == [0.75, 0.75]
    assert hit_rates([]) == []


def test_the_waterfall_hangs_together() -> None:
    found = Waterfall(
        counterfactual_nano=1000,
        write_premium_nano=300,
        read_discount_nano=100,
        actual_nano=1200,
        saved_nano=-200,
        unexplained=0,
    )
    without, premium, discount, actual = waterfall_rows(found)
    assert without["top"] == premium["bottom"]
    assert premium["top"] == discount["top"]
    assert discount["bottom"] == actual["top"]


def test_a_cell_that_begins_like_a_formula_is_text() -> None:
    written = as_csv([{"a": "=1+1", "b": -1, "c": "@x"}, {"a": 'say "no"', "b": None, "c": "\t"}])
    assert written == 'a,b,c\n\'=1+1,-1,\'@x\n"say ""no""",,\'\t\n'
    assert as_csv([]) == ""


@pytest.mark.parametrize("palettes", [TOKENS, BLOCKS, HITS, MONEY])
def test_a_colour_means_one_thing_in_both_themes(
    palettes: dict[Theme, dict[str, str]],
) -> None:
    assert list(palettes["light"]) == list(palettes["dark"])
    for palette in palettes.values():
        assert len(set(palette.values())) == len(palette)


def test_every_reason_has_its_advice() -> None:
    known = {*get_args(MissReason), *get_args(DivergenceKind), "engine_restart", "routed_elsewhere"}
    assert known <= ADVICE.keys()
    assert advice("made_up") == UNKNOWN


def test_pages_have_addresses_and_titles_of_their_own() -> None:
    assert len({entry.name for entry in entries()}) == len(entries()) == 12
    assert len({entry.title for entry in entries()}) == 12
