"""What the pages say of leases, keys and limits equals the engines' own entries, and plain SQL.
What Savings and Latency say equals a count of the usage fields that the clients were answered.

Two engines of small pools, three workspaces and random traffic: some leases are refused or yield.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from scripts.bench.load import MESSAGES, body_of, headers_of, marked
from scripts.stack import ADMIN_KEY, ENGINE_SECRET
from tests.dashboard.conftest import Show
from tests.dashboard.ledgers import rows
from tests.dashboard.signed_in import said, table
from tests.dashboard.test_figures import (
    INPUT,
    LENGTHS,
    PROMPT,
    READ,
    SAVED,
    SHOWN_SHARE,
    WRITE_1H,
    WRITE_5M,
    card,
)
from tests.e2e.fleet import running_fleet
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

NUM_TURNS = 60
LIMIT_NANO = 1_000_000_000
OUTPUT = 5000
WORKSPACES = ("desk", "code", "reports")
Page = Callable[[str], AppTest]


@dataclass(frozen=True)
class Live:
    gateway: str
    engines: list[str]
    data: Path
    usages: dict[str, list[Counter[str]]] = field(default_factory=dict)
    """By workspace, what each answer's usage said."""

    @property
    def answered(self) -> list[Counter[str]]:
        return [usage for listing in self.usages.values() for usage in listing]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return rows(self.data, query)

    def entries(self) -> list[dict[str, Any]]:
        """What the engines say themselves."""
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        urls = [f"{engine}/v1/entries" for engine in self.engines]
        return [
            entry for url in urls for entry in httpx.get(url, headers=headers, timeout=60).json()
        ]

    def metric(self, engine: str, name: str, label: str) -> dict[str, float]:
        """The values of one of an engine's `/metrics`, by a label."""
        text = httpx.get(f"{engine}/metrics", timeout=60).text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return {s.labels[label]: s.value for s in samples if s.name.endswith(name)}

    def ended(self) -> dict[str, float]:
        """The leases that ended, by how."""
        counts: Counter[str] = Counter()
        for engine in self.engines:
            counts.update(self.metric(engine, "leases_ended_total", "reason"))
        return dict(counts)


def send(gateway: str, chance: random.Random) -> dict[str, list[Counter[str]]]:
    """The usage of each answer, by workspace; writes by TTL are `5m` and `1h`."""
    admin = Admin(gateway)
    keys = {}
    usages = {}
    for name in WORKSPACES:
        admin.workspace(name, monthly_spend_nano=LIMIT_NANO)
        keys[name] = admin.make_key(name)[1]
        usages[name] = list[Counter[str]]()
    with httpx.Client(base_url=gateway, timeout=180, trust_env=False) as http:
        for _ in range(NUM_TURNS):
            which = chance.randrange(5)
            system = marked(
                f"{which} " + "The lamp. " * (150 + 200 * which), ("5m", "1h")[which % 2]
            )
            question = "Why? " * chance.randrange(1, 90)
            body = body_of("synthetic", system, question, max_tokens=chance.randrange(1, 5))
            name = chance.choice(WORKSPACES)
            reply = http.post(MESSAGES, json=body, headers=headers_of(keys[name]))
            usage = reply.raise_for_status().json()["usage"]
            names = ("input_tokens", "output_tokens", "cache_read_input_tokens")
            counts = Counter({name: usage[name] for name in names})
            for ttl in ("5m", "1h"):
                counts[ttl] = usage["cache_creation"][f"ephemeral_{ttl}_input_tokens"]
            usages[name].append(counts)
    return usages


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    data = tmp_path_factory.mktemp("live")
    with running_fleet(data, 2, 1, {"ENGINE_NUM_BLOCKS": "700"}) as fleet:
        usages = send(fleet.gateway.url, random.Random(20261122))
        site = Live(fleet.gateway.url, fleet.engines, fleet.gateway.data, usages)
        eventually(lambda: site.rows("SELECT COUNT(*) FROM turns")[0][0] == NUM_TURNS)
        yield site


@pytest.fixture
def page(live: Live, show: Show) -> Page:
    return lambda name: show(live.gateway, name, ADMIN_KEY, range="24h")


def test_leases_are_the_engines_own_entries(live: Live, page: Page) -> None:
    app = page("prefixes")
    entries = live.entries()
    leased = [entry for entry in entries if entry["state"] == "leased"]
    assert 0 < len(leased) < len(entries), "some are leased, some are best effort"
    leases, below = card(app, "Leases")
    assert (leases, below) == (str(len(leased)), f"{len(entries) - len(leased)} more best effort")
    tokens = sum(lease["tokens"] for lease in leased)
    assert card(app, "Tokens held")[0] == formats.compact(tokens)
    text = said(app, "markdown")
    assert f"**{len(leased)} prefixes are promised**" in text
    assert f"{formats.in_words(tokens)} tokens" in text
    minutes, seconds = card(app, "Ends next")[0].split(":")
    soonest = min(lease["expires_in_seconds"] for lease in leased)
    remaining = 60 * int(minutes) + int(seconds)
    assert -1 < remaining - soonest < 120, "in whole seconds, and asked for a moment earlier"


def test_each_lease_has_its_own_counts_and_net(live: Live, page: Page) -> None:
    frame = table(page("prefixes"), "Ends in")
    entries = {entry["entry"]: entry for entry in live.entries()}
    assert set(frame["Entry"]) == set(entries)
    ledger = {
        prefix: (saved, turn, tokens)
        for prefix, saved, turn, tokens, _ in live.rows(
            f"""SELECT prefix, {SAVED}, id,
                cache_read_tokens + cache_write_5m_tokens + cache_write_1h_tokens, MAX(opened_ms)
                FROM turns WHERE prefix IS NOT NULL GROUP BY workspace_id, prefix"""
        )
    }
    with_net = 0
    for row in frame.to_dict("records"):
        entry = entries[row["Entry"]]
        for name in ("Tokens", "Blocks", "Reads"):
            assert row[name] == entry[name.lower()], name
        assert row["State"].partition(":")[0] == entry["state"].replace("_", " ")
        assert (": " in row["State"]) == (entry["reason"] is not None)
        assert row["TTL"] == entry["ttl"]
        saved, turn, tokens = ledger[entry["name"]]
        assert row["Tokens"] == tokens
        if row["Net saved ($)"] == row["Net saved ($)"]:
            assert row["Net saved ($)"] == pytest.approx(saved / 1e9)
            assert row["Last request"] == turn
            with_net += 1
    assert with_net > 3


def test_keys_and_limits(live: Live, page: Page) -> None:
    app = page("workspaces")
    keys = table(app, "Ends (UTC)").set_index("Key id")
    limits = table(app, "Spend limit ($)").set_index("Workspace")
    expected = live.rows(
        f"""SELECT key_id, workspace_id, COUNT(*), 1.0 * SUM(cache_read_tokens) / SUM({PROMPT}),
            {SAVED}, SUM(cost_nano) FROM turns GROUP BY key_id"""
    )
    assert len(expected) == 3
    for key, workspace, count, rate, saved, cost in expected:
        assert keys.loc[key, "Workspace"] == workspace and keys.loc[key, "Requests"] == count
        assert keys.loc[key, "Hit rate"] == pytest.approx(rate, abs=SHOWN_SHARE)
        assert keys.loc[key, "Net saved ($)"] == pytest.approx(saved / 1e9)
        assert limits.loc[workspace, "This month ($)"] == pytest.approx(cost / 1e9)
        share = min(cost / LIMIT_NANO, 1)
        assert limits.loc[workspace, "Of the limit"] == pytest.approx(share, abs=SHOWN_SHARE)


def test_leases_kept_counts_how_they_ended(live: Live, page: Page) -> None:
    admin = Admin(live.gateway)
    doomed = next(lease for lease in admin.get("leases") if lease["entry"]["state"] == "leased")
    entry = doomed["entry"]["entry"]
    workspace = doomed["workspace"]
    engine = doomed["engine"]
    admin.delete(f"leases/{entry}?workspace={workspace}&engine={engine}")
    ended = live.ended()
    num_kept = ended.pop("expired", 0)
    lost = {how: n for how, n in ended.items() if n}
    assert lost.get("dropped") == 1
    # The gateway puts down what engines told, and goes on when they are gone.
    put_down = lambda: admin.get("leases/kept")["lost"] == lost  # noqa: E731
    eventually(put_down)
    share, line = card(page("overview"), "Leases kept")
    assert share == formats.percent(num_kept / (num_kept + sum(lost.values())))
    assert line.startswith("early: ")
    assert sum(int(part.split()[0]) for part in line.removeprefix("early: ").split(", ")) == sum(
        lost.values()
    )


def test_the_pool_is_in_use_alike_on_all_pages_and_in_metrics(live: Live, page: Page) -> None:
    pools = [live.metric(engine, "kv_blocks", "state") for engine in live.engines]
    total = sum(sum(pool.values()) for pool in pools)
    leased = sum(pool["leased"] for pool in pools)
    in_use = (leased + sum(pool["active"] for pool in pools)) / total
    assert 0.05 < in_use < 0.95, "so that a wrong formula shows"
    percentage = formats.percent(in_use)
    overview, memory, fleet = (page(name) for name in ("overview", "memory", "fleet"))
    assert card(overview, "Pool in use")[0] == card(memory, "Pool in use")[0] == percentage
    assert card(memory, "Leased")[0] == formats.percent(leased / total)
    assert f"{percentage} of their KV memory is in use" in said(fleet, "markdown")
    shares = sorted((pool["active"] + pool["leased"]) / sum(pool.values()) for pool in pools)
    for app in (overview, fleet):
        assert sorted(table(app, "Pool in use")["Pool in use"]) == pytest.approx(shares, abs=5.1e-4)


def prompt_of(usage: Counter[str]) -> int:
    return usage.total() - usage["output_tokens"]


def test_savings_are_those_of_the_usage_that_clients_were_told(live: Live, page: Page) -> None:
    """Each answer's usage at the reference prices, against the cards and the table."""
    app = page("savings")
    totals = Counter[str]()
    for usage in live.answered:
        totals.update(usage)
    assert min(totals["cache_read_input_tokens"], totals["5m"], totals["1h"]) > 0
    without = prompt_of(totals) * INPUT + totals["output_tokens"] * OUTPUT
    premium = totals["5m"] * (WRITE_5M - INPUT) + totals["1h"] * (WRITE_1H - INPUT)
    discount = totals["cache_read_input_tokens"] * (INPUT - READ)
    for label, nano in {
        "Net saved": discount - premium,
        "Without a cache": without,
        "Write premium": premium,
        "Read discount": discount,
        "Actual cost": without + premium - discount,
    }.items():
        assert card(app, label)[0] == formats.dollars(nano), label
    frame = next(t.value for t in app.dataframe if t.value.columns[0] == "Workspace")
    by_workspace = frame.set_index("Workspace")
    assert set(by_workspace.index) == {name for name, listing in live.usages.items() if listing}
    for name, row in by_workspace.iterrows():
        of_workspace = Counter[str]()
        for usage in live.usages[name]:
            of_workspace.update(usage)
        assert row["Requests"] == len(live.usages[name])
        assert row["Read (tokens)"] == of_workspace["cache_read_input_tokens"]
        assert (row["Written 5m (tokens)"], row["Written 1h (tokens)"]) == (
            of_workspace["5m"],
            of_workspace["1h"],
        )
        uncached = row["Reused automatically (tokens)"] + row["Computed, not written (tokens)"]
        assert (
            uncached == of_workspace["input_tokens"]
            and row["Output (tokens)"] == of_workspace["output_tokens"]
        )


def test_latency_counts_the_reads_that_clients_were_told(live: Live, page: Page) -> None:
    frame = table(page("latency"), "Times shorter").set_index("Prompt tokens")
    outside = Counter[tuple[str, str]]()
    for usage in live.answered:
        low, high = next(bounds for bounds in LENGTHS if bounds[0] < prompt_of(usage) <= bounds[1])
        kind = "With a read" if usage["cache_read_input_tokens"] else "Without a read"
        outside[f"{low:,} to {high:,}", kind] += 1
    assert len({length for length, _ in outside}) > 1
    for (length, kind), count in outside.items():
        assert frame.loc[length, kind] == count
    assert frame[["With a read", "Without a read"]].sum().sum() == NUM_TURNS
