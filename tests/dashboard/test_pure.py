"""What knows no browser and no gateway: selections, axes, rows, words, verdicts, prompts, code."""

import json
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import msgspec
import pytest

from dashboard import prompt
from dashboard.client import AdminClient, ClientError
from dashboard.prompt import Block, NotBlocks
from dashboard.ui import formats
from dashboard.ui.charts import TOKENS, first_shown, moment, with_tokens
from dashboard.ui.conditions import as_html
from dashboard.ui.filters import RANGES, Selection, first_range
from dashboard.ui.parts import as_csv, plain, text_width, without_value
from dashboard.ui.reasons import ADVICE, UNKNOWN, advice
from dashboard.views import entries
from dashboard.views.advice import by_change
from dashboard.views.fleet import load_rows, state_of, technique_table
from dashboard.views.latency import compared, why_none
from dashboard.views.overview import is_comparable
from dashboard.views.playground import model_names
from dashboard.views.prefixes import entry_table
from dashboard.views.requests import turn_amounts, turn_facts
from dashboard.views.savings import saved_over_time
from dashboard.views.why import known_to, verdict
from gateway.dialects.anthropic.request import AnthropicTtl
from gateway.structs.advice import Finding
from gateway.structs.fleet import About, EngineReport, LiveEntry, LoadPoint
from gateway.structs.misses import GatewayMissReason
from gateway.structs.usage import (
    Bucket,
    Latency,
    LatencyCell,
    Percentiles,
    Turn,
    TurnDivergence,
    Usage,
)
from tests.dashboard.fake_admin import ADMIN_KEY, serve_fake
from tests.dashboard.ledgers import turn as row_of
from tests.dashboard.live_answers import engine_now, lease, made

NOW = datetime(2026, 11, 21, 12, 0, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        *((formats.percent, *pair) for pair in ((None, "–"), (0.0, "0.0%"), (0.98765, "98.8%"))),
        *((formats.compact, *pair) for pair in ((0, "0"), (999, "999"), (1000, "1.00K"))),
        *((formats.compact, *pair) for pair in ((999_960, "1.00M"), (5 * 10**9, "5.00G"))),
        *((formats.dollars, *pair) for pair in ((None, "–"), (0, "$0"), (999, "<$0.000001"))),
        (formats.dollars, -999, "−<$0.000001"),
        (formats.dollars, 2_500_000, "$0.002500"),
        (formats.dollars, -12_345_678, "−$0.0123"),
        (formats.dollars, 1_234_567_890_123, "$1,234.57"),
        *((formats.duration, *pair) for pair in ((5.9, "5s"), (75, "1m 15s"), (90_000, "1d 1h"))),
        (formats.duration, 3725, "1h 2m"),
        *((plain, *pair) for pair in (("desk_1", "desk_1"), ("![x](y)", None), (None, None))),
    ],
)
def test_numbers_and_names_as_people_read_them(write: Any, value: Any, text: str) -> None:
    assert write(value) == text


@pytest.mark.parametrize("minutes", [5, 60, 6 * 60, 24 * 60, 7 * 24 * 60, 30 * 24 * 60])
def test_no_label_of_an_axis_of_time_stands_twice_whatever_the_hour(minutes: int) -> None:
    """Both ends of a day from 06:00 to 06:00 were "06:00"."""
    steps = [s * 60 for s in (1 / 12, 1 / 4, 1 / 2, 1, 5, 15, 30, 60, 180, 360, 720, 1440, 2880)]
    step = next(step for step in [*steps, 7 * 86_400] if step >= minutes * 60 / 6 * 0.7)
    for hour in range(24):
        until = NOW.replace(hour=hour, second=0)
        since = until - timedelta(minutes=minutes)
        axis = moment(int(since.timestamp() * 1000), int(until.timestamp() * 1000)).to_dict()
        form = axis["axis"]["format"]
        ticks = range(int(since.timestamp()), int(until.timestamp()) + 1)
        labels = [f"{datetime.fromtimestamp(t, UTC):{form}}" for t in ticks if t % step == 0]
        assert len(labels) == len(set(labels)), labels


@pytest.mark.parametrize(
    ("hours", "label"),
    [(None, "24h"), (0.0, "1h"), (0.9, "1h"), (1.1, "6h"), (7, "24h"), (99, "24h")],
)
def test_the_first_range_has_all_requests_of_a_first_day(hours: float | None, label: str) -> None:
    now = 1_800_000_000_000
    first_ms = None if hours is None else now - int(hours * 3_600_000)
    about = msgspec.convert(made(About, now_ms=now, first_ms=first_ms), About)
    assert first_range(about) == label


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (11, 10, "+10 % vs period before"),
        (5, 10, "−50 % vs period before"),
        (-5, 10, "−150 % vs period before"),
        (5, -10, "+150 % vs period before"),
        (1200, 10, "120 times the period before"),
        (10, 10, "0 % vs period before"),
        (10**9, 0, "period before: $0"),
        (10**9, None, "period before: –"),
        (None, 10**9, "period before: $1.00"),
    ],
)
def test_a_change_is_of_what_was(now: int | None, before: int | None, text: str) -> None:
    assert formats.change(now, before, is_comparable=True) == text


@pytest.mark.parametrize(
    ("now", "before", "text"),
    [
        (0.5, 0.4, "+10.0 points vs period before"),
        (0.4, 0.4, "0 points vs period before"),
        (None, 0.4, "period before: 40.0%"),
        (0.5, None, "period before: –"),
    ],
)
def test_a_share_changes_by_points(now: float | None, before: float | None, text: str) -> None:
    assert formats.points(now, before, is_comparable=True) == text
    note = f"period before: {formats.percent(before)}"
    assert formats.points(now, before, is_comparable=False) == note


@pytest.mark.parametrize("chosen", RANGES)
def test_a_range_ends_after_now_at_a_time_that_all_share(chosen: str) -> None:
    selection = Selection(range=chosen)
    since, until = selection.span(NOW)
    length = (until - since).total_seconds() - RANGES[chosen][0]
    assert 0 <= length < 3600 and (length == 0 or since.minute == since.second == 0)
    assert NOW < until <= NOW + timedelta(seconds=selection.refresh_seconds)
    assert selection.span(NOW + timedelta(seconds=1)) == (since, until)


def test_a_block_can_be_marked_with_every_ttl_of_the_messages_api() -> None:
    assert list(prompt.TTLS.values()) == [None, *get_args(AnthropicTtl)]


def usage(*savings: int, **fields: Any) -> Usage:
    """Buckets of an hour, the first and the last cut by the range."""
    ends = (0, len(savings) - 1)
    series = [
        made(Bucket, start_ms=hour * 3_600_000, saved_nano=saved, is_partial=hour in ends)
        for hour, saved in enumerate(savings)
    ]
    until = len(savings) * 3_600_000 - 600_000
    span = {"since_ms": 1_800_000, "until_ms": until, "bucket_seconds": 3600}
    return msgspec.convert(made(Usage, series=series, **span, **fields), Usage)


@pytest.mark.parametrize(
    ("now", "before", "comparable"),
    [(30_000, 2_999, False), (30_000, 3_000, True), (0, 20, True), (3, 19, False), (0, 0, False)],
)
def test_a_period_with_hardly_any_requests_is_none_to_compare_with(
    now: int, before: int, comparable: bool
) -> None:
    report = usage(totals={"requests": now}, before={"requests": before})
    assert is_comparable(report) is comparable


def test_intervals_that_the_range_cuts_are_drawn_as_wide_as_they_are() -> None:
    drawn = saved_over_time(usage(5, -2, 1))
    assert drawn[0]["start"].minute == 30 and drawn[-1]["end"].minute == 50
    assert [row["part"] != "" for row in drawn] == [True, False, True]
    assert [row["class"] for row in drawn] == ["Saved", "Lost", "Saved"]


@pytest.mark.parametrize(
    ("first", "minutes"), [(None, 30), (0, 30), (4, 30), (7, 7 * 60), (9, 8 * 60 + 54)]
)
def test_a_chart_begins_with_the_first_request_where_most_came_before_it(
    first: int | None, minutes: int
) -> None:
    """It spans a tenth of the range at least: 56 minutes of these 9 hours and 20 minutes."""
    report = usage(*([0] * 10))
    starts = [] if first is None else [report.series[first].start_ms]
    assert first_shown(starts, report.since_ms, report.until_ms) == minutes * 60_000


def test_a_chart_of_load_spans_a_few_intervals_and_ends_with_the_range() -> None:
    """Three minutes of a month were drawn on an axis of three days, where nobody saw them, and the
    interval that goes on was drawn beyond the range."""
    month_ms = 30 * 86_400_000
    first_ms = month_ms - 170_000
    points = [
        LoadPoint(
            start_ms=first_ms + number * 60_000,
            in_use=0.5,
            leased=0.5,
            running=0,
            waiting=0,
            queued=0,
        )
        for number in range(3)
    ]
    starts = (point.start_ms for point in points)
    assert first_shown(starts, 0, month_ms, 10 * points[0].width_ms) == month_ms - 600_000
    drawn = load_rows(points, {"Leased": "leased"}, month_ms)
    assert [row["start"] for row in drawn] == [formats.moment(point.start_ms) for point in points]
    assert drawn[-1]["end"] == formats.moment(month_ms)
    # One of a month is hours long, also where it is the only one. It was drawn as a minute.
    hours = msgspec.structs.replace(points[0], width_ms=4 * 3_600_000, start_ms=0)
    (bar,) = load_rows([hours], {"Leased": "leased"}, month_ms)
    assert bar["end"] == formats.moment(hours.width_ms)


def test_no_comparison_gives_the_reason_that_holds() -> None:
    """`No length has 5 of each` stood on the Overview where thousands had been measured, on engines
    of two kinds."""
    many = Percentiles(requests=900, p50=1.0, p95=1.0, p99=1.0)
    few = Percentiles(requests=2, p50=1.0, p95=1.0, p99=1.0)
    for seconds, mixed, reason in (
        (many, ["m"], "engines of several kinds"),
        (few, [], "no length has 5 of each"),
        (None, [], "no answer yet"),
    ):
        cells = [
            LatencyCell(
                model="m", above_tokens=0, up_to_tokens=1000, is_hit=is_hit, seconds=seconds
            )
            for is_hit in (True, False)
            if seconds is not None
        ]
        latency = Latency(
            hits=few, misses=few, cells=cells, bucket_seconds=60, series=[], mixed=mixed
        )
        assert compared(latency) is None
        assert why_none(latency) == reason


def test_an_engine_that_is_drained_and_down_is_down() -> None:
    """It was blue and `draining`, and one that is drained was counted among the ready ones."""
    engine = engine_now(True) | {"is_draining": True}
    for status, state in (("ready", "draining"), ("down", "down, draining")):
        report = msgspec.convert(engine | {"status": status}, EngineReport)
        assert state_of(report) == state


def test_a_share_that_is_not_0_does_not_look_like_it() -> None:
    shares = {0.0: "0.0%", 0.0002: "<0.1%", 0.0005: "0.1%", 0.9999: ">99.9%", 1.0: "100.0%"}
    assert {share: formats.percent(share) for share in shares} == shares


def test_a_long_text_far_down_is_not_cut() -> None:
    """The grid sizes a column by its first rows."""
    short = [{"Outcome": "stop"} for _ in range(20)]
    assert text_width("Outcome", short) is None
    wide = text_width("Outcome", [*short, {"Outcome": "client_disconnect"}])
    assert wide is not None and wide >= 6 * len("client_disconnect")


def test_a_column_without_a_value_is_left_out_but_for_money() -> None:
    rows = [{"Model": "m", "HTTP": None, "Error": "", "Cost ($)": None, "Reads": 0}] * 2
    assert without_value(rows) == ["HTTP", "Error"]


def test_findings_that_ask_for_the_same_change_stand_together() -> None:
    """Five prefixes of one workspace that all begin with an id were five boxes."""
    alike = [finding("system.0", "Leave the id out.", prefix) for prefix in ("a", "b")]
    unlike = finding("system.0", "Sort the tools.", "c")
    assert by_change([alike[0], unlike, alike[1]]) == [alike, [unlike]]


def finding(path: str, change: str, text: str) -> Finding:
    return Finding(kind="nonce", path=path, text=text, change=change, tokens=1, multiples=1.0)


def test_a_legend_names_no_ttl_class_without_a_token() -> None:
    names = with_tokens(TOKENS["light"], ["Written, 1 hour", "Computed, not written"])
    assert [name for name in names if name.startswith("Written, ")] == ["Written, 1 hour"]
    assert "Read from cache" in names, "what is no TTL class is always named"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("see `df -h`, `mount`", "see <code>df -h</code>, <code>mount</code>"),
        ("a ` alone", "a ` alone"),
        ("`<img src=x>`", "<code>&lt;img src=x&gt;</code>"),
        ("![x](//evil) <b>", "![x](//evil) &lt;b&gt;"),
    ],
)
def test_words_between_backticks_are_code_and_all_else_is_as_it_came(text: str, html: str) -> None:
    assert as_html(text) == html


def test_a_cell_that_begins_like_a_formula_is_text() -> None:
    text = as_csv([{"a": "=1+1", "b": -1, "c": "@x"}, {"a": 'say "no"', "b": None, "c": "\t"}])
    assert text == 'a,b,c\n\'=1+1,-1,\'@x\n"say ""no""",,\'\t\n'
    assert as_csv([]) == ""


def test_every_reason_has_its_advice_and_every_page_its_address() -> None:
    assert set(get_args(GatewayMissReason)) <= ADVICE.keys()
    assert advice("made_up") == UNKNOWN
    assert len({entry.name for entry in entries()}) == len(entries()) == 12
    assert len({entry.title for entry in entries()}) == 12


@pytest.mark.parametrize("seconds", [100.0, 500_000.0])
def test_an_end_of_its_own_is_no_ttl_however_little_is_left(seconds: float) -> None:
    """A cached content of a week was called `1h` in its last hour."""
    live = msgspec.convert(lease(1), LiveEntry)
    entry = msgspec.structs.replace(live.entry, expires_in_seconds=seconds)
    timed = msgspec.structs.replace(entry, has_own_lifetime=True)
    rows = entry_table(
        [
            msgspec.structs.replace(live, entry=entry),
            msgspec.structs.replace(live, entry=timed),
            msgspec.structs.replace(live, entry=entry, cached_content="cachedContents/a"),
        ],
        {},
    )
    assert [row["TTL"] for row in rows] == ["5m", "its own", "its own"]
    assert [row["TTL left"] for row in rows] == [min(seconds / 300, 1.0), None, None]


def test_a_ledger_that_cannot_be_read_is_no_bare_status() -> None:
    """On a damaged ledger every page said that the gateway answers 529."""
    with serve_fake() as fake:
        for status, words in (
            (529, "is busy or can't read its database;"),
            (500, r"answers 500\.$"),
        ):
            fake.status = status
            with pytest.raises(ClientError, match=f"^The gateway {words}"):
                AdminClient(fake.url, ADMIN_KEY).get("/admin/v1/usage", dict)


def a_turn(read: int = 0, write: int = 0, miss_reason: str | None = None, **changes: Any) -> Turn:
    row = row_of(1, NOW, read=read, write_5m=write, miss_reason=miss_reason)
    known = {name: row.get(name) for name in Turn.__struct_fields__}
    return msgspec.convert(known | {"workspace": "w"} | changes, Turn)


def differs(kind: str | None, shared: int, whole: int | None = None) -> TurnDivergence:
    return TurnDivergence(
        turn="t",
        earlier="e",
        kind=kind,
        shared_tokens=shared,
        missed_tokens=9,
        earlier_tokens=whole,
    )


@pytest.mark.parametrize(
    ("judged", "compared", "title", "is_good", "shows_difference"),
    [
        (a_turn(read=100), None, "A hit", True, False),
        (a_turn(read=100), differs("messages_changed", 100), "A hit", True, False),
        (a_turn(100, 50), differs(None, 100), "A hit that grew", True, False),
        (a_turn(100, 50), differs("messages_changed", 150), "A hit that grew", True, False),
        (a_turn(100, 50), differs("system_changed", 99), "The system prompt", False, True),
        (a_turn(0, 50, "cold"), differs("system_changed", 0), "The system prompt", False, True),
        (a_turn(0, 9, "system_changed"), differs("system_changed", 0), "The system", False, True),
        (a_turn(0, 50, "cold"), differs("messages_changed", 50), "First time seen", False, False),
        (a_turn(0, 50, "cold"), None, "First time seen", False, False),
        (a_turn(0, 50, "ttl_expired"), differs("messages_changed", 9), "Came after", False, False),
        (a_turn(), None, "No miss", True, False),
    ],
)
def test_there_is_one_verdict_and_never_against_a_turns_own_counts(
    judged: Turn, compared: Any, title: str, is_good: bool, shows_difference: bool
) -> None:
    judgement = verdict(judged, compared)
    assert judgement.advice.title.startswith(title)
    assert judgement.is_good is is_good
    assert (judgement.difference is not None) is shows_difference


def test_a_place_says_how_exactly_it_is_known() -> None:
    exact = msgspec.structs.replace(differs("system_changed", 9), is_exact=True)
    assert known_to(exact).startswith("The place is exact")
    floor = msgspec.structs.replace(differs("system_changed", 9), grid_characters=4096)
    assert known_to(floor).startswith("The place is known to within 4,096 characters")


def test_a_date_in_front_is_moved_before_anything_is_marked() -> None:
    """A marker behind it would only add the price of writing."""
    early = verdict(a_turn(0, 0, "no_breakpoint"), differs("system_changed", 3, 900)).advice
    assert early.change.startswith("Move what varies behind the")
    late = verdict(a_turn(0, 0, "no_breakpoint"), differs("messages_changed", 890, 900)).advice
    assert late.change.startswith("Put `cache_control` on")


def test_what_was_sent_before_is_not_seen_for_the_first_time() -> None:
    advice = verdict(a_turn(0, 50, "cold"), None, a_turn(0, 50, "cold")).advice
    assert advice.title == "Sent before, and not held"


def test_a_turn_that_read_says_so_before_what_it_lacked() -> None:
    advice = verdict(a_turn(980, 20, "ttl_expired"), None).advice
    assert advice.means.startswith("980 tokens were read. A later marker was not: ")


PARTS = {"input_tokens": 50, "cache_write_1h_tokens": 30}
TOOL = '{"name": "t", "input_schema": {"type": "object"}}'


def test_blocks_make_a_body_and_the_body_makes_the_blocks() -> None:
    blocks = [
        Block("user", "Hi"),
        Block("system", "Be brief.", "1h"),
        Block("tool", TOOL, "5m"),
        Block("assistant", "Yes?"),
        Block("user", "Go on."),
        Block("user", "Please."),
    ]
    body = prompt.body_of(blocks, "m", 8)
    assert [tool["name"] for tool in body["tools"]] == ["t"]
    assert body["tools"][0]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert prompt.body_of(prompt.blocks_of(body), "m", 8) == body


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}] * 41,
    ],
)
def test_what_blocks_cannot_show_stays_a_body(messages: Any) -> None:
    with pytest.raises(NotBlocks):
        prompt.blocks_of({"messages": messages})


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        ("chat", {"choices": [{"message": {"content": "Yes."}}]}),
        ("completions", {"choices": [{"text": "Yes."}]}),
        ("gemini", {"candidates": [{"content": {"parts": [{"text": "Yes."}]}}]}),
        (
            "responses",
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": "Yes."}]}]},
        ),
    ],
)
def test_the_text_of_a_whole_answer(dialect: str, answer: dict[str, Any]) -> None:
    assert prompt.text_of(dialect, answer) == "Yes." and prompt.text_of(dialect, {}) == ""


def test_code_to_copy_is_whole_and_has_no_key() -> None:
    body = prompt.body_of([Block("user", 'it\'s "quoted" \\ $HOME\nnew line')], "m", 8)
    for path in ("/v1/messages", "/v1/chat/completions"):
        compile(prompt.python("http://x", path, body), "code", "exec")
    shell = prompt.curl("http://x", "/v1/messages", body).replace("curl ", "printf '%s\\n' ", 1)
    output = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True)
    assert json.dumps(body, indent=2, ensure_ascii=False) in output.stdout


@pytest.mark.parametrize(("automatic", "reused"), [(0, 0), (40, 0), (70, 20), (500, 50)])
def test_what_was_reused_stands_behind_what_was_written(automatic: int, reused: int) -> None:
    counts = prompt.counts_of(a_turn(100, 20, automatic_tokens=automatic, **PARTS))
    assert counts["Reused automatically"] == reused
    assert counts["Computed, not written"] == 50 - reused
    spans = prompt.prompt_spans(counts)
    assert sum(counts.values()) == spans[-1]["end"] == 200


def test_a_marker_elsewhere_would_have_held_what_is_before_it() -> None:
    blocks = [Block("system", "a", "1h"), Block("system", "b", "5m"), Block("user", "c")]
    rows = prompt.part_rows(blocks, prompt.counts_of(a_turn(100, 20, **PARTS)), [100, 150])
    assert [row["tokens"] for row in rows] == [100, 50, 50]
    markers = prompt.elsewhere_rows(rows)
    assert [row["It reads"] for row in markers] == [100, 150, 200]
    assert [row["Known"] for row in markers] == ["exactly"] * 3
    assert markers[-1]["Of the prompt"] == 1.0


def sent(seconds: float | None, read: int = 0, cost: int | None = 5_000_000) -> Turn:
    return a_turn(read, input_tokens=9, first_token_seconds=seconds, cost_nano=cost)


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (sent(0.188), sent(0.016, 1930), "12 times as soon**: 188 ms → 16 ms. It read 1,930 of"),
        (sent(0.1), sent(0.11, 5), "about as soon**: 100 ms → 110 ms"),
        (sent(0.1), sent(0.3, 5), "answered later**"),
        (sent(None), sent(0.3), "has no time to first token"),
        (sent(0.1), sent(0.1, cost=500_000), "and cost $0.000500 instead of $0.005000."),
        (sent(0.1), sent(0.1, cost=None), "prompt tokens."),
    ],
)
def test_what_a_second_send_gained_is_one_sentence(
    first: Turn, second: Turn, sentence: str
) -> None:
    assert sentence in prompt.gained(first, second)


def test_an_alias_is_named_with_what_it_stands_for() -> None:
    listed = [
        {"id": "tiny"},
        {"id": "house", "root": "tiny"},
        {"id": "tiny:legal", "root": "legal", "parent": "tiny"},
    ]
    assert model_names(listed) == {
        "tiny": "tiny",
        "house": "house (alias of tiny)",
        "tiny:legal": "tiny:legal",
    }


def test_amounts_are_amounts_and_facts_are_not() -> None:
    values: dict[str, Any] = {
        field.name: None for field in msgspec.structs.fields(Turn) if field.required
    }
    values |= {"approximate": "kvzip at 0.5", "cost_nano": 0, "saved_nano": 0}
    facts = turn_facts(Turn(**values))
    amounts = turn_amounts(Turn(**values))
    assert facts["Approximate"] == "kvzip at 0.5"
    measured = ("In the queue", "Prefill", "First token", "Decode", "Duration")
    assert {name for name in amounts if "(tokens)" not in name} == {
        *measured,
        "Cost",
        "Net saved",
    }
    assert not any("(tokens)" in name for name in facts)
    withheld = turn_amounts(Turn(**(values | {"price": "not delivered", "output_tokens": 7})))
    assert withheld["Cost"] == "not delivered: nothing is charged"
    assert withheld["Net saved"] is None
    assert withheld["Output (tokens)"] == 7


def test_an_engine_that_still_measures_is_no_engine_that_allows_or_refuses() -> None:
    reports = []
    for number, is_measuring in enumerate((True, False)):
        engine = engine_now(True, f"engine-{number}")
        engine["description"]["is_measuring"] = is_measuring
        if not is_measuring:
            row = {"method": "kvzip", "parameter": 0.5, "kl": 0.1, "agreement": 0.9}
            engine["description"]["techniques"] = [row | {"tokens": 9, "is_allowed": True}]
        reports.append(msgspec.convert(engine, EngineReport))
    rows = technique_table(reports)
    assert [(row["Engine"], row["KL (nats)"], row["Allowed"]) for row in rows] == [
        ("engine-0", None, "not known yet"),
        ("engine-1", 0.1, "yes"),
    ]
