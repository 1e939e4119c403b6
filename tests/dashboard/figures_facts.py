"""What SQL says of the ledger of a load, what its clients counted, and figures of several pages."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from engine.protocol import TTLS, WRITE_FIELDS
from engine.protocol.reports import PrefillSums
from gateway.base.token_time import added, slope
from scripts.stack import ENGINE_SECRET
from tests.dashboard.figures_load import (
    KILLED,
    MODELS,
    NATIVE,
    NUM_KILLS,
    Load,
    Sent,
)
from tests.dashboard.figures_table import Table
from tests.dashboard.ledgers import rows
from tests.dashboard.signed_in import table
from tests.dashboard.test_figures import card

INPUT = 1000
READ = 100
OUTPUT = 5000


"""Reference prices in nano-dollars a token; a write costs its class's multiple of the input."""


WRITES = {ttl: round(INPUT * TTLS[ttl].write_multiple) for ttl in TTLS}


WRITTEN = "(" + " + ".join(WRITE_FIELDS.values()) + ")"


PROMPT = f"(input_tokens + cache_read_tokens + {WRITTEN})"


AUTOMATIC = f"SUM(MIN(MAX(automatic_tokens - {WRITTEN}, 0), input_tokens))"


FAILED = "outcome LIKE '%\\_error' ESCAPE '\\'"


PREMIUM = " + ".join(f"{name} * {WRITES[ttl] - INPUT}" for ttl, name in WRITE_FIELDS.items())


SAVED = f"SUM(cache_read_tokens * {INPUT - READ} - ({PREMIUM}))"


COST = f"""SUM(input_tokens * {INPUT} + cache_read_tokens * {READ} + output_tokens * {OUTPUT}
    + {WRITTEN} * {INPUT} + {PREMIUM})"""


# A share in a table has three digits, and so has a percentage on a card.
SHARE = 5.1e-4


class Facts:
    """What SQL says of the ledger, and what was counted outside."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.turns = load.turns
        self.engines = [
            load.fleet.told("stats", dict[str, Any], number) for number in range(len(MODELS))
        ]
        self.entries = [entry for url in load.fleet.engines for entry in entries_of(url)]
        self.outputs = load.outputs()

    def value(self, columns: str, where: str = "1") -> Any:
        return self.rows(columns, where)[0][0]

    def rows(self, columns: str, where: str = "1", rest: str = "") -> list[tuple[Any, ...]]:
        return rows(self.load.data, f"SELECT {columns} FROM turns WHERE {where} {rest}")

    def of(self, **values: Any) -> list[Sent]:
        """The turns with these values."""
        return [
            turn
            for turn in self.turns
            if all(getattr(turn, name) == value for name, value in values.items())
        ]

    def failed(self, workspace: str | None = None, engine: int | None = None) -> int:
        """The turns that ended with an error, before their answer or in it."""
        cut = sum(
            turn.is_cut
            for turn in self.turns
            if workspace in (None, turn.workspace) and engine in (None, turn.engine)
        )
        return self.undelivered(workspace, engine) + cut

    def undelivered(self, workspace: str | None = None, engine: int | None = None) -> int:
        """The turns with an error in place of their answer."""
        return sum(
            count
            for (name, number), count in self.load.failed.items()
            if workspace in (None, name) and engine in (None, number)
        )


def entries_of(url: str) -> list[dict[str, Any]]:
    """What an engine itself says that it holds."""
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    reply = httpx.get(f"{url}/v1/entries", headers=headers, timeout=60, trust_env=False)
    return [entry | {"url": url} for entry in reply.raise_for_status().json()]


def saved_by(turns: Sequence[Sent]) -> int:
    return sum(
        turn.read * (INPUT - READ) - turn.written * (WRITES[turn.ttl] - INPUT)  # type: ignore[index]
        for turn in turns
    )


def without_output(turns: Sequence[Sent]) -> int:
    return sum(turn.prompt for turn in turns) * INPUT


def percent(part: float, whole: float) -> str:
    return formats.percent(part / whole) if whole else formats.NO_VALUE


def token_seconds(facts: Facts, engine: int) -> float | None:
    """The time of a token by the steps that the ledger keeps of an engine."""
    sums_rows = rows(
        facts.load.data,
        f"""SELECT prefill_times FROM epoch_reports
            WHERE engine = 'engine-{engine}' AND prefill_times IS NOT NULL""",
    )
    return slope(added(msgspec.json.decode(text, type=PrefillSums) for (text,) in sums_rows))


def add_time_avoided(table_: Table, page: str, facts: Facts, app: AppTest) -> None:
    """SQL: each engine's reads by the time of its token. Outside: the tokens below it."""
    name = "Prefill time avoided"
    value, below = card(app, name)
    read_tokens = {
        engine: facts.value("COALESCE(SUM(cache_read_tokens), 0)", f"engine = 'engine-{engine}'")
        for engine in (NATIVE, KILLED)
    }
    times = {engine: token_seconds(facts, engine) for engine in read_tokens}
    known = [read_tokens[engine] * time for engine, time in times.items() if time is not None]
    sql = formats.seconds(sum(known) if known else None)
    table_.add(page, name, value, sql=sql)
    unknown = sum(read_tokens[engine] for engine, time in times.items() if time is None)
    untimed_words = f", {formats.compact(unknown)} of them not timed" if unknown else ""
    outside = sum(turn.read for turn in facts.turns)
    sentence = f"{formats.compact(sum(read_tokens.values()))} tokens read{untimed_words}"
    counted = f"{formats.compact(outside)} tokens read{untimed_words}"
    table_.add(page, f"{name}, below", below, sql=sentence, outside=counted)


ENDED = "SELECT reason, SUM(leases) FROM lease_ends WHERE width_seconds = 60 GROUP BY reason"


def add_first_tokens(table_: Table, page: str, facts: Facts, app: AppTest) -> None:
    """Medians of one model and length, which the gateway alone times. Within 1 %, and a unit's
    last digit."""
    below = card(app, "First token, with a read")[1] or ""
    for name, sign in (("with a read", ">"), ("without a read", "=")):
        label = f"First token, {name}"
        value = card(app, label)[0]
        if value == formats.NO_VALUE:
            table_.add(page, label, value, sql=formats.NO_VALUE)
            continue
        model, low, high = compared_by(facts)
        times = first_tokens(facts, model, low, high, sign)
        median = times[math.ceil(0.5 * len(times)) - 1]
        number, unit = value.split()
        seconds = float(number) / (1000 if unit == "ms" else 1)
        rounding = (5e-4 if unit == "ms" else 5e-3) / median
        table_.add(page, label, seconds, sql=median, within=0.011 + rounding)
    if page == "overview" and below and "tokens" in below:
        model, low, high = compared_by(facts)
        outside = f"{low:,} to {high:,} tokens, {model}"
        table_.add(page, "First token, of which prompts", below, sql=outside)


LENGTHS = ((0, 1000), (1000, 4000), (4000, 16_000), (16_000, 64_000))


def first_tokens(facts: Facts, model: str, low: int, high: int, sign: str) -> list[float]:
    where = f"""model = '{model}' AND {PROMPT} > {low} AND {PROMPT} <= {high}
        AND cache_read_tokens {sign} 0 AND first_token_seconds IS NOT NULL"""
    return sorted(seconds for (seconds,) in facts.rows("first_token_seconds", where))


def compared_by(facts: Facts) -> tuple[str, int, int]:
    """The model and length that most turns with and without a read both have."""
    sides = {
        (model, low, high): [
            len(first_tokens(facts, model, low, high, sign)) for sign in (">", "=")
        ]
        for model in MODELS
        for low, high in LENGTHS
    }
    return max(sides, key=lambda which: min(sides[which]))


def in_use_of(engines: Sequence[dict[str, Any]]) -> float:
    pools = [engine["blocks"] for engine in engines]
    return sum(pool["active"] + pool["leased"] for pool in pools) / sum(
        pool["total"] for pool in pools
    )


def add_engine_rows(table_: Table, page: str, facts: Facts, app: AppTest) -> None:
    pools = table(app, "Pool in use").set_index("Engine")
    for number, stats in enumerate(facts.engines):
        row = pools.loc[f"engine-{number}"]
        values = {
            "Pool in use": (in_use_of([stats]), SHARE),
            "Running": (stats["running"], 0.0),
            "Waiting": (stats["waiting"], 0.0),
            "Leases": (stats["num_leases"], 0.0),
            "Preempted": (stats["counters"]["preempted_requests"], 0.0),
            "Foreign": (stats["blocks"]["foreign"] / stats["blocks"]["total"], SHARE),
            "Foreign running": (stats["foreign_running"], 0.0),
        }
        for name, (outside, apart) in values.items():
            if name in row:
                named = f"engine-{number}: {name}"
                value = float(row[name])
                table_.add(page, named, value, outside=outside, apart=apart, of=name)


def twice(facts: Facts) -> list[Sent]:
    """The turns of prefixes that came more than once. A prefix is a text of a workspace, of all
    models."""
    counts = Counter((turn.workspace, turn.prefix) for turn in facts.turns)
    return [turn for turn in facts.turns if counts[turn.workspace, turn.prefix] > 1]


TWICE = "prefix IN (SELECT prefix FROM turns GROUP BY prefix HAVING COUNT(*) > 1)"


def read_per_write(turns: Sequence[Sent]) -> float:
    """The sum over prefixes of the tokens that were read of each that was written."""
    reads = Counter[tuple[str, str]]()
    writes = Counter[tuple[str, str]]()
    for turn in turns:
        key = turn.workspace, turn.prefix
        reads[key] += turn.read
        writes[key] += turn.written
    return sum(reads[key] / writes[key] for key in writes)


def living(facts: Facts) -> list[Sent]:
    """The turns of what is held now, since it was written last in this life of its engine."""
    since: dict[tuple[str, int, str], list[Sent]] = {}
    for turn in facts.turns:
        if turn.engine == KILLED and turn.life < NUM_KILLS:
            continue
        key = turn.workspace, turn.engine, turn.prefix
        if turn.written:
            since[key] = []
        since[key].append(turn)
    return [turn for turns in since.values() for turn in turns]
