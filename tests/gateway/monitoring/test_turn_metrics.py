"""What `/metrics` tells of turns, tokens and times is what the ledger and the engine tell of them.

One stack of real processes serves turns that hit, miss, fail, have several choices and are of
several workspaces. Then both pages are scraped, and compared with the rows of the ledger.
"""

import contextlib
import re
import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import SECONDS_PER_TOKEN, TOKENS_PER_REQUEST
from gateway.base.metrics import MAX_MODELS, EngineState, Metrics
from scripts.stack import ADMIN_KEY, API_KEY, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

Labels = tuple[tuple[str, str], ...]
NUM_NAMED = 2
CONTEXT = 8192
CLASSES = {
    "input": "input_tokens",
    "cache_read": "cache_read_tokens",
    "cache_write_5m": "cache_write_5m_tokens",
    "cache_write_1h": "cache_write_1h_tokens",
    "output": "output_tokens",
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Scrape:
    """Values by a series' name and labels; types and help texts by the family's name."""

    values: Mapping[tuple[str, Labels], float]
    types: Mapping[str, str]
    helps: Mapping[str, str]

    def value(self, name: str, **labels: str) -> float:
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.values.items() if found == name)

    def buckets(self, name: str) -> dict[float, float]:
        """The cumulative counts by their edge; series of one histogram are added up."""
        found: Counter[float] = Counter()
        for (series, labels), value in self.values.items():
            if series == f"{name}_bucket":
                found[float(dict(labels)["le"])] += value
        return dict(found)


@dataclass(frozen=True)
class Served:
    gateway: Scrape
    engine: Scrape
    rows: list[Row]


def scrape(url: str) -> Scrape:
    values, types, helps = {}, {}, {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=120).text):
        types[family.name], helps[family.name] = family.type, family.documentation
        for sample in family.samples:
            series = sample.name, tuple(sorted(sample.labels.items()))
            assert series not in values, f"{series} twice"
            values[series] = sample.value
    return Scrape(values, types, helps)


def turns(data: Path) -> list[Row]:
    with contextlib.closing(sqlite3.connect(data / "ledger.db")) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute("SELECT * FROM turns")]


def play(url: str, key: str, number: int) -> Iterator[int]:
    """Yield the status of each of some turns."""
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    http = httpx.Client(base_url=url, headers=headers, timeout=120)
    block = {"type": "text", "text": f"A rule of {number}. " * (60 * number)}
    marked = {**block, "cache_control": {"type": "ephemeral", "ttl": "1h" if number % 2 else "5m"}}
    asked = [{"role": "user", "content": "q"}]
    body = {"model": "synthetic", "messages": asked, "system": [marked]}
    with http:
        for max_tokens in (1, 2, 40):
            yield http.post("/v1/messages", json={**body, "max_tokens": max_tokens}).status_code
        chat = {"model": "synthetic", "messages": asked, "max_tokens": 5, "n": 3}
        yield http.post("/v1/chat/completions", json=chat).status_code
        # Four bytes are a token here, so only the engine knows that it is too long with its roles.
        long = [{"role": "user", "content": "x" * 4 * (CONTEXT - 1)}]
        refused = {"model": "synthetic", "messages": long, "max_tokens": 5}
        yield http.post("/v1/messages", json=refused).status_code


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    data = tmp_path_factory.mktemp("data")
    engine = {
        "ENGINE_MIN_CACHE_TOKENS": "16",
        "ENGINE_SYNTHETIC_CONTEXT": str(CONTEXT),
        "ENGINE_SYNTHETIC_DECODE_MS": "5",
    }
    gateway = {"HOLDFAST_METRICS_WORKSPACES": str(NUM_NAMED)}
    with running_stack(data, "synthetic", engine, gateway) as stack:
        admin, keys = Admin(stack.gateway, ADMIN_KEY), [API_KEY]
        for name in ("first", "second", "third"):
            admin.workspace(name)
            keys.append(admin.make_key(name)[1])
        statuses = [s for i, key in enumerate(keys) for s in play(stack.gateway, key, i + 1)]
        assert Counter(statuses) == {200: 16, 400: 4}
        eventually(lambda: len(turns(data)) == 20)
        return Served(scrape(stack.gateway), scrape(stack.engine), turns(data))


def sums(rows: Iterable[Row], column: str) -> int:
    return sum(row[column] for row in rows)


def prompt_tokens(row: Row) -> int:
    return sum(row[column] for label, column in CLASSES.items() if label != "output")


def test_turns_and_tokens_are_those_of_the_ledger_by_model(served: Served) -> None:
    gateway, rows = served.gateway, served.rows
    by_outcome = Counter((row["outcome"], row["engine_model"]) for row in rows)
    assert len({model for _, model in by_outcome}) == 1
    for (outcome, model), number in by_outcome.items():
        name = "holdfast_gateway_turns_total"
        assert gateway.value(name, outcome=outcome, model=model) == number
    assert gateway.total("holdfast_gateway_turns_total") == len(rows)
    for label, column in CLASSES.items():
        found = gateway.value("holdfast_gateway_tokens_total", **{"class": label, "model": model})
        assert found == sums(rows, column), label
    assert sums(rows, "cache_read_tokens") and sums(rows, "cache_write_1h_tokens")


def test_each_histogram_has_the_values_of_the_ledgers_rows(served: Served) -> None:
    spent = [row for row in served.rows if sum(row[column] for column in CLASSES.values())]
    whole = [row for row in spent if row["decode_seconds"] is not None and row["output_tokens"] > 1]
    assert len(spent) == 16 and len(whole) == 12
    given = {
        "turn_input_tokens": [prompt_tokens(row) for row in spent],
        "turn_output_tokens": [row["output_tokens"] for row in spent],
        "turn_seconds": [row["duration_seconds"] for row in served.rows],
        "first_token_seconds": [row["first_token_seconds"] for row in spent],
        "time_per_output_token_seconds": [
            row["decode_seconds"] / (row["output_tokens"] - 1) for row in whole
        ],
    }
    for name, values in given.items():
        family = f"holdfast_gateway_{name}"
        check_histogram(served.gateway, family, values)


def check_histogram(scraped: Scrape, name: str, values: list[float]) -> None:
    buckets = scraped.buckets(name)
    edges = sorted(buckets)
    for edge in edges:
        assert buckets[edge] == sum(value <= edge for value in values), (name, edge)
    assert buckets[float("inf")] == scraped.total(f"{name}_count") == len(values)
    assert scraped.total(f"{name}_sum") == pytest.approx(sum(values))


def test_the_engine_tells_the_tokens_and_the_time_that_the_ledger_has(served: Served) -> None:
    engine = served.engine
    spent = [row for row in served.rows if row["output_tokens"]]
    given = [
        sum(row[column] for column in CLASSES.values()) - row["output_tokens"] for row in spent
    ]
    check_histogram(engine, "holdfast_engine_request_input_tokens", given)
    outputs = [row["output_tokens"] for row in spent]
    check_histogram(engine, "holdfast_engine_request_output_tokens", outputs)
    # Each choice's first token has none before it; four turns had three choices.
    gaps = sum(outputs) - len(spent) - 2 * 4
    assert engine.total("holdfast_engine_inter_token_seconds_count") == gaps
    # What each choice took after its first token is no longer than its turn took to decode.
    bound = sum(row["decode_seconds"] * (3 if row["dialect"] == "openai" else 1) for row in spent)
    assert 0.8 * 0.005 * gaps <= engine.total("holdfast_engine_inter_token_seconds_sum") <= bound


def test_only_so_many_workspaces_are_named_and_none_by_default(served: Served) -> None:
    gateway = served.gateway
    found = {
        dict(labels)["workspace"]: value
        for (name, labels), value in gateway.values.items()
        if name == "holdfast_gateway_workspace_turns_total"
    }
    assert found == {"default": 5, "first": 5, "other": 10}
    for label, column in CLASSES.items():
        named = [row for row in served.rows if row["workspace_id"] == "first"]
        told = {"class": label, "workspace": "first"}
        assert gateway.value("holdfast_gateway_workspace_tokens_total", **told) == sums(
            named, column
        )
    silent = Metrics()
    silent.count_first_token("cold", "a model", 1.0)
    assert b"{workspace" not in silent.exposition()


def test_models_are_those_of_engines_and_there_are_not_many() -> None:
    metrics = Metrics()
    state = EngineState(True, False, "closed", 0)
    for number in range(MAX_MODELS + 50):
        metrics.show_engines({"one": state._replace(model=f"model {number}")})
    metrics.count_first_token("cold", None, 1.0)
    metrics.count_first_token("cold", f"model {MAX_MODELS + 49}", 1.0)
    metrics.count_first_token("cold", "model 0", 1.0)
    text = metrics.exposition().decode()
    models = set(re.findall(r'model="([^"]*)"', text))
    assert models == {"unknown", *(f"model {number}" for number in range(MAX_MODELS))}
    assert 'first_token_seconds_count{cache="cold",model="unknown"} 2.0' in text


def test_buckets_have_those_of_the_conventions_for_generative_ai() -> None:
    """https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/"""
    tokens = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304]
    assert list(TOKENS_PER_REQUEST) == [*tokens, 16777216, 67108864]
    seconds = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
    begins = bisect_left(SECONDS_PER_TOKEN, 0.01)
    assert list(SECONDS_PER_TOKEN[begins : begins + len(seconds)]) == seconds
    assert list(SECONDS_PER_TOKEN) == sorted(set(SECONDS_PER_TOKEN))


def test_names_and_helps_are_as_prometheus_asks(served: Served) -> None:
    """The rules of `promtool check metrics`, and those of prometheus.io/docs/practices/naming."""
    for program, page in (("gateway", served.gateway), ("engine", served.engine)):
        for name, kind in page.types.items():
            assert name.startswith((f"holdfast_{program}_", "process_")), name
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name) and "__" not in name, name
            assert page.helps[name].strip(), name
            assert kind in ("counter", "gauge", "histogram"), name
            words = name.split("_")
            assert not {"counter", "gauge", "histogram", "info"} & set(words), name
            assert not {"ms", "milliseconds", "minutes", "kb", "mb", "percent"} & set(words), name
            # The parser takes `_total` off a counter's name.
            assert words[-1] not in ("total", "bucket", "count", "sum", "created"), name
        names = {name for name, _ in page.values}
        assert not [name for name in names if name.endswith("_created")]
        for name, labels in page.values:
            assert "le" not in dict(labels) or name.endswith("_bucket"), name
            # A label that repeats the name's own word says nothing.
            assert not {label for label, _ in labels} & {"name", "type", "value"}, name
