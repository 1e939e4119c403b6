"""Every number of Overview, Savings, Memory, Prefixes, Latency, Fleet and Advice, as it is drawn,
beside SQL over the ledger and a count that was made outside of gateway and ledger.

FIGURES_TURNS says how many turns each load has beside those that fill the engines. The table is
printed (`pytest -s`).
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from engine.protocol import TTLS, WRITE_FIELDS
from scripts.stack import ADMIN_KEY
from tests.dashboard.conftest import Show
from tests.dashboard.figures_facts import (
    AUTOMATIC,
    COST,
    ENDED,
    FAILED,
    INPUT,
    LENGTHS,
    OUTPUT,
    PREMIUM,
    PROMPT,
    READ,
    SAVED,
    SHARE,
    TWICE,
    WRITES,
    Facts,
    add_engine_rows,
    add_first_tokens,
    add_time_avoided,
    compared_by,
    first_tokens,
    in_use_of,
    percent,
    read_per_write,
    saved_by,
    token_seconds,
    twice,
    without_output,
)
from tests.dashboard.figures_live import add_fleet, add_memory, add_prefixes
from tests.dashboard.figures_load import (
    KILLED,
    MODELS,
    NUM_KILLS,
    PREFILL_US,
    Sent,
    running_load,
)
from tests.dashboard.figures_table import Table
from tests.dashboard.ledgers import rows
from tests.dashboard.signed_in import table
from tests.dashboard.test_figures import bars, card

NUM_TURNS = int(os.environ.get("FIGURES_TURNS", "30"))


SEED = os.environ.get("TEST_SEED", "20261129")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    with running_load(tmp_path_factory.mktemp("figures"), NUM_TURNS, SEED) as load:
        yield Facts(load)


def add_overview(table_: Table, facts: Facts, app: AppTest) -> None:
    turns = facts.turns
    read_tokens = sum(turn.read for turn in turns)
    prompt = sum(turn.prompt for turn in turns)
    written_tokens = sum(turn.written for turn in turns)
    requests = len(turns) + facts.undelivered()
    rates = {
        "Token hit rate": ("SUM(cache_read_tokens)", f"SUM({PROMPT})", read_tokens, prompt),
        "Cacheable hit rate": (
            "SUM(cache_read_tokens)",
            f"SUM({PROMPT} - input_tokens)",
            read_tokens,
            read_tokens + written_tokens,
        ),
        "Request hit rate": (
            "SUM(cache_read_tokens > 0)",
            "COUNT(*)",
            sum(turn.read > 0 for turn in turns),
            requests,
        ),
    }
    for name, (part, whole, counted, of) in rates.items():
        sql = percent(facts.value(part), facts.value(whole))
        tokens = card(app, name)[0]
        table_.add("overview", name, tokens, sql=sql, outside=percent(counted, of))
    sql = formats.in_words(facts.value("SUM(cache_read_tokens)")).capitalize()
    hero = next(
        text.value.partition(" tokens were read")[0].strip("*")
        for text in app.markdown
        if " tokens were read" in text.value
    )
    outside = formats.in_words(read_tokens).capitalize()
    table_.add("overview", "tokens read, in the sentence", hero, sql=sql, outside=outside)
    tokens, below = card(app, "Requests")
    count = formats.compact(facts.value("COUNT(*)"))
    table_.add("overview", "Requests", tokens, sql=count, outside=formats.compact(requests))
    refused = rows(facts.load.data, "SELECT SUM(requests) FROM refusals")[0][0]
    failed = facts.value("COUNT(*)", FAILED)
    table_.add(
        "overview",
        "Requests, below",
        below,
        sql=f"{failed:,} failed, {refused:,} refused",
        outside=f"{facts.failed():,} failed, {facts.load.refused:,} refused",
    )
    money = formats.dollars(facts.value(SAVED))
    outside = formats.dollars(saved_by(turns))
    table_.add("overview", "Net saved", card(app, "Net saved")[0], sql=money, outside=outside)
    add_time_avoided(table_, "overview", facts, app)
    add_kept(table_, facts, app)
    add_first_tokens(table_, "overview", facts, app)
    in_use = in_use_of(facts.engines)
    tokens = card(app, "Pool in use")[0]
    table_.add("overview", "Pool in use", tokens, outside=formats.percent(in_use))
    add_engine_rows(table_, "overview", facts, app)
    add_reasons(table_, facts, app)
    drawn = bars(app, 0).groupby("class")["amount"].sum().to_dict()
    classes = {
        "Read from cache": ("SUM(cache_read_tokens)", read_tokens),
        **{
            f"Written, {TTLS[ttl].words}": (
                f"SUM({WRITE_FIELDS[ttl]})",
                sum(turn.written for turn in turns if turn.ttl == ttl),
            )
            for ttl in TTLS
        },
    }
    for name, (sum_of, counted) in classes.items():
        tokens = int(drawn.pop(name, 0))
        table_.add("overview", f"chart: {name}", tokens, sql=facts.value(sum_of), outside=counted)
    tokens_left = int(sum(drawn.values()))
    outside = sum(turn.input for turn in turns)
    sql = facts.value("SUM(input_tokens)")
    table_.add("overview", "chart: neither read nor written", tokens_left, sql=sql, outside=outside)
    tokens = int(drawn.get("Reused automatically", 0))
    table_.add("overview", "chart: Reused automatically", tokens, sql=facts.value(AUTOMATIC))


def add_kept(table_: Table, facts: Facts, app: AppTest) -> None:
    """When the engine was killed each prompt that it had in that life was leased."""
    value, below = card(app, "Leases kept")
    granted = rows(
        facts.load.data,
        f"""SELECT SUM(granted), SUM(expired) FROM epoch_reports
            WHERE engine = 'engine-{KILLED}' AND epoch <> '{facts.engines[KILLED]["epoch"]}'""",
    )[0]
    gone = [turn for turn in facts.of(engine=KILLED) if turn.life < NUM_KILLS]
    lost = len({(turn.life, turn.workspace, turn.prefix) for turn in gone})
    line = f"early: {granted[0] - granted[1]:,} lost in a restart"
    counted = f"early: {lost:,} lost in a restart"
    table_.add("overview", "Leases kept, below", below, sql=line, outside=counted)
    ended = Counter(dict(rows(facts.load.data, ENDED)))
    expired = ended["expired"]
    sql = percent(expired, expired + granted[0] - granted[1])
    table_.add("overview", "Leases kept", value, sql=sql)


def add_reasons(table_: Table, facts: Facts, app: AppTest) -> None:
    """The sum of the reasons is the number of turns that read nothing and have one."""
    shares = [text.value for text in app.text if " · " in text.value and "request" in text.value]
    total = sum(int(text.split(" · ")[1].split()[0].replace(",", "")) for text in shares)
    sql = facts.value("COUNT(*)", "miss_reason IS NOT NULL AND cache_read_tokens = 0")
    outside = sum(turn.written > 0 and not turn.read for turn in facts.turns)
    table_.add("overview", "Why prompts missed: requests", total, sql=sql, outside=outside)


def add_savings(table_: Table, facts: Facts, app: AppTest) -> None:
    turns = facts.turns
    outputs = sum(facts.outputs.values())
    without = without_output(turns) + outputs * OUTPUT
    premium = sum(turn.written * (WRITES[turn.ttl] - INPUT) for turn in turns)  # type: ignore[index]
    discount = sum(turn.read for turn in turns) * (INPUT - READ)
    money = {
        "Net saved": (SAVED, discount - premium),
        "Without a cache": (f"SUM({PROMPT} * {INPUT} + output_tokens * {OUTPUT})", without),
        "Write premium": (f"SUM({PREMIUM})", premium),
        "Read discount": (f"SUM(cache_read_tokens) * {INPUT - READ}", discount),
        "Actual cost": (COST, without + premium - discount),
    }
    for name, (sum_of, counted) in money.items():
        sql = formats.dollars(facts.value(sum_of))
        table_.add("savings", name, card(app, name)[0], sql=sql, outside=formats.dollars(counted))
    saved = discount - premium
    than = "less" if saved >= 0 else "more"
    share = f"{percent(abs(saved), without)} {than} than without"
    table_.add("savings", "Net saved, below", card(app, "Net saved")[1], outside=share)
    add_time_avoided(table_, "savings", facts, app)
    undelivered = facts.undelivered()
    line = f"{formats.counted(undelivered, 'request')} ended with an error"
    height = next(text.value for text in app.caption if "ended with an error" in text.value)
    table_.add("savings", "not delivered", height.partition(" in place")[0], outside=line)
    by_model = table(app, "Output (tokens)").set_index("Model")
    for engine, model in enumerate(MODELS):
        where = f"model = '{model}'"
        add_group(table_, facts, by_model.loc[model], model, where, facts.of(engine=engine), engine)
    by_workspace = next(t.value for t in app.dataframe if t.value.columns[0] == "Workspace")
    by_workspace = by_workspace.set_index("Workspace")
    for workspace, row in by_workspace.iterrows():
        where = f"workspace_id = '{workspace}'"
        add_group(table_, facts, row, str(workspace), where, facts.of(workspace=workspace), None)
    drawn = bars(app, 1)
    height = float((drawn["top"] - drawn["bottom"]).sum())
    sql = facts.value(SAVED) / 1e9
    table_.add("savings", "chart: saved", height, sql=sql, outside=(discount - premium) / 1e9)
    add_prefixes_paid(table_, facts, app)
    hosted = table(app, "This traffic ($)")
    for name in ("This traffic ($)", "Without caching ($)"):
        # test_figures.py compares them with the file of prices.
        table_.add("savings", f"{name}, rows", len(hosted), outside=len(hosted), of=name)


def add_group(
    table_: Table,
    facts: Facts,
    row: Any,
    name: str,
    where: str,
    turns: list[Sent],
    engine: int | None,
) -> None:
    """A row of a table by model or workspace. Output of a cancelled turn is known by engine."""
    workspace = None if engine is not None else name
    failed = facts.failed(workspace, engine)
    read_tokens = sum(turn.read for turn in turns)
    prompt = sum(turn.prompt for turn in turns)
    output = facts.outputs[engine] if engine is not None else None
    cost = None
    if output is not None:
        cost = (without_output(turns) - saved_by(turns) + output * OUTPUT) / 1e9
    known = {
        "Requests": ("COUNT(*)", len(turns) + facts.undelivered(workspace, engine)),
        "Failed": (f"SUM({FAILED})", failed),
        "Hit rate": (f"1.0 * SUM(cache_read_tokens) / SUM({PROMPT})", read_tokens / prompt),
        "Net saved ($)": (f"{SAVED} / 1e9", saved_by(turns) / 1e9),
        "Cost ($)": (f"{COST} / 1e9", cost),
        "Read (tokens)": ("SUM(cache_read_tokens)", read_tokens),
        **{
            f"Written {ttl} (tokens)": (
                f"SUM({WRITE_FIELDS[ttl]})",
                sum(turn.written for turn in turns if turn.ttl == ttl),
            )
            for ttl in TTLS
        },
        "Reused automatically (tokens)": (AUTOMATIC, None),
        "Computed, not written (tokens)": (f"SUM(input_tokens) - {AUTOMATIC}", None),
        "Output (tokens)": ("SUM(output_tokens)", output),
    }
    for column, (sum_of, counted) in known.items():
        table_.add(
            "savings",
            f"{name}: {column}",
            float(row[column]),
            sql=facts.value(sum_of, where),
            outside=counted,
            apart=SHARE if column == "Hit rate" else 0.0,
            of=column,
        )
    uncached = row["Reused automatically (tokens)"] + row["Computed, not written (tokens)"]
    outside = sum(turn.input for turn in turns)
    table_.add("savings", f"{name}: neither read nor written", float(uncached), outside=outside)


def add_prefixes_paid(table_: Table, facts: Facts, app: AppTest) -> None:
    """The table of prefixes that came more than once, by the sums of its columns."""
    frame = table(app, "Cheaper TTL")
    frame = frame[frame["Prefix id"].notna()]
    turns = twice(facts)
    distinct = len({(turn.workspace, turn.prefix) for turn in turns})
    known: dict[str, tuple[str, float]] = {
        "Requests": ("COUNT(*)", len(turns)),
        "With a read": ("SUM(cache_read_tokens > 0)", sum(turn.read > 0 for turn in turns)),
        "Net ($)": (f"{SAVED} / 1e9", saved_by(turns) / 1e9),
    }
    for column, (sum_of, counted) in known.items():
        value = float(frame[column].sum())
        sql = facts.value(sum_of, TWICE)
        table_.add("savings", f"prefixes: {column}", value, sql=sql, outside=counted, of=column)
    gaps = ("Gaps up to 5 min", "Gaps 5 min to 1 h", "Longer gaps")
    gap = "opened_ms - LAG(opened_ms) OVER (PARTITION BY prefix ORDER BY opened_ms, id)"
    with_gaps = f"(SELECT {gap} AS gap FROM turns WHERE {TWICE})"
    counts = rows(
        facts.load.data,
        f"""SELECT COALESCE(SUM(gap <= 300000), 0),
            COALESCE(SUM(gap > 300000 AND gap <= 3600000), 0), COALESCE(SUM(gap > 3600000), 0)
            FROM {with_gaps}""",
    )[0]
    for name, count in zip(gaps, counts, strict=True):
        value = float(frame[name].sum())
        table_.add("savings", f"prefixes: {name}", value, sql=count, of=name)
    value = float(sum(frame[name].sum() for name in gaps))
    table_.add("savings", "prefixes: all gaps", value, outside=len(turns) - distinct)
    table_.add("savings", "prefixes: rows", len(frame), outside=distinct)
    column = "Tokens read per token written"
    value = float(frame[column].sum())
    table_.add(
        "savings",
        f"prefixes: {column}",
        value,
        outside=read_per_write(turns),
        apart=0.005 * len(frame),
        of=column,
    )
    newest = {(turn.workspace, turn.prefix): turn for turn in turns}.values()
    tokens = sum(turn.read + turn.written for turn in newest)
    value = float(frame["Tokens"].sum())
    table_.add("savings", "prefixes: Tokens", value, outside=tokens, of="Tokens")
    # No TTL is judged of a prefix that several models hold, each for itself.
    models = {turn.prefix: set[str]() for turn in turns}
    for turn in turns:
        models[turn.prefix].add(turn.model)
    judged = [turn for turn in turns if len(models[turn.prefix]) == 1]
    several = " and ".join(sorted(MODELS))
    count = sum(len(names) > 1 for names in models.values())
    table_.add("savings", "prefixes: of both models", sum(frame["Model"] == several), outside=count)
    # A read saves 0.9 of an input token, and a write costs its class's premium.
    column = "Pays back after (reads)"
    value = float(frame[column].sum())
    ttls = {(turn.workspace, turn.prefix): turn.ttl for turn in judged}
    premiums = [WRITES[ttl] - INPUT for ttl in ttls.values()]  # type: ignore[index]
    least = sum(math.ceil(premium / (INPUT - READ)) for premium in premiums)
    table_.add("savings", f"prefixes: {column}", value, outside=least, of=column)
    column = "It would save ($)"
    value = float(frame[column].sum())
    saved = sum(would_save([t for t in judged if t.prefix == prefix]) for prefix in models)
    table_.add("savings", f"prefixes: {column}", value, outside=saved / 1e9, of=column)


def would_save(turns: Sequence[Sent]) -> int:
    """What the cheaper of 5 minutes and an hour would have saved of a prefix whose turns all came
    within 5 minutes of the one before: one write, and reads. Other classes are not compared."""
    if not turns or turns[0].ttl not in ("5m", "1h"):
        return 0
    tokens = sum(turn.read + turn.written for turn in turns) // len(turns)
    reads = READ * (len(turns) - 1)
    costs = {ttl: tokens * (WRITES[ttl] + reads) for ttl in ("5m", "1h")}  # type: ignore[index]
    return costs[turns[0].ttl] - min(costs.values())


def add_latency(table_: Table, facts: Facts, app: AppTest) -> None:
    add_first_tokens(table_, "latency", facts, app)
    frame = table(app, "Times shorter").set_index("Prompt tokens")
    (model,) = set(frame["Model"])
    for low, high in LENGTHS:
        for name, sign in (("With a read", ">"), ("Without a read", "=")):
            times = first_tokens(facts, model, low, high, sign)
            length = f"{low:,} to {high:,}"
            if length not in frame.index:
                assert not times
                continue
            counted = sum(
                low < turn.prompt <= high and (turn.read > 0) == (sign == ">")
                for turn in facts.of(engine=MODELS.index(model))
            )
            row = frame.loc[length]
            table_.add(
                "latency",
                f"{length}: {name}",
                float(row[name]),
                sql=len(times),
                outside=counted,
                of=name,
            )
            for share, column in ((0.5, "median"), (0.95, "95 %")):
                of = f"{name}, {column} (s)"
                if times:
                    sql = times[math.ceil(share * len(times)) - 1]
                    value = float(row[of])
                    table_.add("latency", f"{length}: {of}", value, sql=sql, within=0.0105, of=of)
    for length, row in frame.iterrows():
        sides = [row[f"{name}, median (s)"] for name in ("Without a read", "With a read")]
        if all(value == value for value in sides):
            outside = sides[0] / sides[1]
            table_.add(
                "latency",
                f"{length}: Times shorter",
                float(row["Times shorter"]),
                outside=outside,
                within=0.002,
                of="Times shorter",
            )
    added_seconds = [
        max(first - prefill, 0.0)
        for first, prefill in facts.rows(
            "first_token_seconds, prefill_seconds + queue_seconds",
            f"model = '{model}' AND prefill_seconds + queue_seconds IS NOT NULL"
            " AND first_token_seconds IS NOT NULL",
        )
    ]
    label = "Gateway overhead"
    # Of an even number the upper of the two in the middle, as the page has it.
    middle = formats.seconds(sorted(added_seconds)[len(added_seconds) // 2])
    table_.add("latency", label, card(app, label)[0], sql=middle)
    label = "Sooner with a read"
    shown_times = card(app, label)[0]
    if shown_times == formats.NO_VALUE:
        table_.add("latency", label, shown_times, sql=formats.NO_VALUE)
        return
    model, low, high = compared_by(facts)
    medians = [
        times[math.ceil(0.5 * len(times)) - 1]
        for times in (first_tokens(facts, model, low, high, sign) for sign in "=>")
    ]
    times_sooner = float(shown_times.removesuffix("×"))
    # Two digits, of two medians within 1 % each.
    table_.add("latency", label, times_sooner, sql=medians[0] / medians[1], within=0.08)


def add_advice(table_: Table, facts: Facts, app: AppTest) -> None:
    """Requests are counted; what other markers would have cost adds up."""
    streams = table(app, "Would save (input tokens)")
    for _, row in streams.iterrows():
        name = f"{row['Workspace']}, {row['Model']}"
        where = f"workspace_id = '{row['Workspace']}' AND model = '{row['Model']}'"
        turns = facts.of(workspace=row["Workspace"], engine=MODELS.index(row["Model"]))
        sql = facts.value("COUNT(*)", f"{where} AND first_token_seconds IS NOT NULL")
        table_.add(
            "advice",
            f"{name}: Requests",
            float(row["Requests"]),
            sql=sql,
            outside=len(turns),
            of="Requests",
        )
    tokens = "Would save (input tokens)"
    hero = next(text.value for text in app.markdown if "of requests" in text.value)
    multiples = float(hero.partition("the price of ")[2].split()[0].strip("*").replace(",", ""))
    value = float(streams[tokens].sum())
    apart = 0.5 * len(streams) + 0.5
    table_.add(
        "advice",
        f"{tokens}, of all and in the sentence",
        multiples,
        outside=value,
        apart=apart,
        of=tokens,
    )
    money = float(streams["Would save ($)"].sum())
    dollars = hero.partition("**$")[2].partition("**")[0]
    table_.add(
        "advice",
        "Would save ($), of all and in the sentence",
        float(dollars),
        outside=money,
        apart=5.1e-5,
        of="Would save ($)",
    )
    add_ways(table_, facts, app, streams.iloc[0])


def add_ways(table_: Table, facts: Facts, app: AppTest, stream: Any) -> None:
    """What the turns of one key and model did cost, and its cards beside its row."""
    ways = table(app, "Cost (input tokens)").set_index("Markers")
    was = ways.loc["As it was"]
    engine = MODELS.index(stream["Model"])
    where = f"workspace_id = '{stream['Workspace']}' AND model = '{stream['Model']}'"
    turns = facts.of(workspace=stream["Workspace"], engine=engine)
    counted = sum(turn.prompt for turn in turns) - saved_by(turns) / INPUT
    paid = f"SUM({PROMPT}) - {SAVED} / {INPUT}.0"
    known: dict[str, tuple[str, float, float]] = {
        "Cost (input tokens)": (paid, counted, 0.5),
        "Cost ($)": (f"({paid}) * {INPUT} / 1e9", counted * INPUT / 1e9, 5e-7),
        "Read": ("SUM(cache_read_tokens)", sum(turn.read for turn in turns), 0.0),
        "Input": ("SUM(input_tokens)", sum(turn.input for turn in turns), 0.0),
        **{
            f"Written {ttl}": (
                f"SUM({WRITE_FIELDS[ttl]})",
                sum(turn.written for turn in turns if turn.ttl == ttl),
                0.0,
            )
            for ttl in TTLS
            if f"Written {ttl}" in ways
        },
        "Requests with a read": ("SUM(cache_read_tokens > 0)", sum(t.read > 0 for t in turns), 0.0),
    }
    for column, (sum_of, outside, apart) in known.items():
        sql = facts.value(sum_of, where)
        table_.add(
            "advice",
            f"as it was: {column}",
            float(was[column]),
            sql=sql,
            outside=outside,
            apart=apart,
            of=column,
        )
    seconds = stream["Prefill saved (s)"]
    cards = {
        "Saves": formats.dollars(round(stream["Would save ($)"] * 1e9)),
        "Saves, input tokens": f"{stream['Would save (input tokens)']:,}",
        # Where the time of a token is not known the row has no value, and the card a dash.
        "Prefill saved": formats.NO_VALUE if pd.isna(seconds) else f"{seconds:,.1f} s",
    }
    for label, expected in cards.items():
        table_.add("advice", label, card(app, label)[0], outside=expected)
    add_found(table_, facts, app, turns, stream)


def add_found(table_: Table, facts: Facts, app: AppTest, turns: list[Sent], stream: Any) -> None:
    """What the requests of the first group share; of all groups the prefill that is saved, by the
    time of their engine's token, and what breaks them: their prompts are editions of one text."""
    label = "Shared beginning, tokens"
    shared = round(sum(turn.read + turn.written for turn in turns) / len(turns))
    table_.add("advice", label, card(app, label)[0], outside=f"{shared:,}")
    streams = table(app, "Would save (input tokens)")
    report = facts.load.fleet.gateway.post("advise", {})
    column = "Prefill saved (s)"
    for _, row in streams.iterrows():
        whose = {"workspace": row["Workspace"], "model": row["Model"]}
        entry = next(t for t in report["streams"] if {name: t[name] for name in whose} == whose)
        seconds = token_seconds(facts, MODELS.index(row["Model"]))
        name = f"{row['Workspace']}, {row['Model']}: {column}"
        if seconds is None:
            assert row[column] != row[column], "not known"
            continue
        sql = entry["saves"]["tokens"] * seconds
        outside = None
        if row["Model"] == MODELS[KILLED]:
            # Its speed is a setting. A step that decodes as well takes longer by one token's time.
            outside = entry["saves"]["tokens"] * PREFILL_US / 1e6
        value = float(row[column])
        table_.add("advice", name, value, sql=sql, within=0.0, apart=6e-4, of=column)
        if outside is not None:
            table_.add("advice", f"{name}, by setting", value, outside=outside, within=0.1)
    faults = float(streams["Faults"].sum())
    table_.add("advice", "Faults, of all", faults, outside=len(streams), of="Faults")


# What is held is looked at first, before it ends.
ADDED = {
    "memory": add_memory,
    "prefixes": add_prefixes,
    "overview": add_overview,
    "savings": add_savings,
    "latency": add_latency,
    "fleet": add_fleet,
    "advice": add_advice,
}


def test_every_number_of_the_pages_is_that_of_the_ledger_and_of_the_clients(
    facts: Facts, show: Show
) -> None:
    table_ = Table()
    missing = {}
    for page, add in ADDED.items():
        app = show(facts.load.url, page, ADMIN_KEY, range="1h")
        add(table_, facts, app)
        missing[page] = table_.missing(page, app)
    print(f"\n{table_.text()}\n{table_.counts()}")
    assert not any(missing.values()), missing
    assert not table_.wrong(), [figure.name for figure in table_.wrong()]
