"""What is measured, what is written of it, and what alerts and the dashboard ask, are one thing.

One stack of real processes serves turns that hit, miss, fail, have several choices and are of
several workspaces. Then both pages are scraped, and compared with the rows of the ledger.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.backends.synthetic import CONTEXT_TOKENS
from engine.metrics import render
from engine.protocol import WRITE_FIELDS
from engine.protocol.reports import BlockStats, Description
from engine.supervisor import Supervisor as EngineSupervisor
from gateway.admin.routes import CONTROLLERS
from gateway.base.metrics import FAULT_OUTCOMES, MAX_MODELS, EngineState, Metrics
from gateway.conditions.kinds import KINDS
from scripts.docs import monitoring
from scripts.stack import ADMIN_KEY, API_KEY, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually, serve_gateway

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "gateway" / "monitoring"
# What Prometheus itself adds to everything that it scrapes.
# `engine` is in the targets of engines (monitoring/targets).
ADDED_LABELS = {"job", "instance", "engine"}
ADDED_METRICS = {"up": "gauge"}
# Their values are few whatever clients do: names of routes, statuses, engines, and fixed words.
BOUNDED_LABELS = {"route", "status", "reason", "outcome", "class", "cache", "engine", "stage"}
BOUNDED_LABELS |= {"result", "state", "loop", "model", "workspace", "block_size", "num_gpu_blocks"}
BOUNDED_LABELS |= {"method", "kind", "severity"}
BOUNDED_LABELS |= {f"gen_ai_{name}" for name in ("operation_name", "provider_name", "token_type")}
BOUNDED_LABELS |= {"gen_ai_response_model", "model_name", "cache"}
Labels = tuple[tuple[str, str], ...]
NUM_NAMED = 2
CLASSES = {
    "input": "input_tokens",
    "cache_read": "cache_read_tokens",
    **{name.removesuffix("_tokens"): name for name in WRITE_FIELDS.values()},
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
        return sum(value for (series, _), value in self.values.items() if series == name)

    def buckets(self, name: str) -> dict[float, float]:
        """The cumulative counts by their edge; series of one histogram are added up."""
        by_edge: Counter[float] = Counter()
        for (series, labels), value in self.values.items():
            if series == f"{name}_bucket":
                by_edge[float(dict(labels)["le"])] += value
        return dict(by_edge)


@dataclass(frozen=True)
class Served:
    gateway: Scrape
    engine: Scrape
    rows: list[Row]


def scrape(url: str) -> Scrape:
    values = {}
    types = {}
    helps = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=120).text):
        types[family.name] = family.type
        helps[family.name] = family.documentation
        for sample in family.samples:
            series = sample.name, tuple(sorted(sample.labels.items()))
            assert series not in values, f"{series} twice"
            values[series] = sample.value
    return Scrape(values, types, helps)


def play(url: str, key: str, number: int) -> Iterator[int]:
    """Yield the status of each of some turns."""
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    http = httpx.Client(base_url=url, headers=headers, timeout=120)
    block = {"type": "text", "text": f"A rule of {number}. " * (60 * number)}
    marked = {**block, "cache_control": {"type": "ephemeral", "ttl": "1h" if number % 2 else "5m"}}
    messages = [{"role": "user", "content": "q"}]
    body = {"model": "synthetic", "messages": messages, "system": [marked]}
    with http:
        for max_tokens in (1, 2, 40):
            yield http.post("/v1/messages", json={**body, "max_tokens": max_tokens}).status_code
        chat = {"model": "synthetic", "messages": messages, "max_tokens": 5, "n": 3}
        yield http.post("/v1/chat/completions", json=chat).status_code
        # Four bytes are a token here, so only the engine knows that it is too long with its roles.
        long = [{"role": "user", "content": "x" * 4 * (CONTEXT_TOKENS - 1)}]
        refused = {"model": "synthetic", "messages": long, "max_tokens": 5}
        yield http.post("/v1/messages", json=refused).status_code


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    data = tmp_path_factory.mktemp("data")
    engine = {
        "ENGINE_MIN_CACHE_TOKENS": "16",
        "ENGINE_STORE": str(tmp_path_factory.mktemp("store")),
        "ENGINE_SYNTHETIC_DECODE_MS": "5",
    }
    gateway = {"HOLDFAST_METRICS_WORKSPACES": str(NUM_NAMED)}
    with running_stack(data, "synthetic", engine, gateway) as stack:
        admin = Admin(stack.gateway, ADMIN_KEY)
        keys = [API_KEY]
        for name in ("first", "second", "third"):
            admin.workspace(name)
            keys.append(admin.make_key(name)[1])
        statuses = [s for i, key in enumerate(keys) for s in play(stack.gateway, key, i + 1)]
        assert Counter(statuses) == {200: 16, 400: 4}
        ledger = f"sqlite:///{data / 'ledger.db'}"
        eventually(lambda: len(ledger_rows(ledger)) == 20)
        return Served(scrape(stack.gateway), scrape(stack.engine), ledger_rows(ledger))


@dataclass(frozen=True)
class Exposed:
    """Types and labels by the names that can be asked for."""

    types: Mapping[str, str]
    labels: Mapping[str, set[str]]
    values: Mapping[tuple[str, str], set[str]]


@dataclass(frozen=True)
class Documented:
    type: str
    labels: frozenset[str]


@pytest.fixture(scope="module")
def exposed(served: Served) -> Exposed:
    """Of both programs."""
    types: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    values: dict[tuple[str, str], set[str]] = {}
    for page in (served.gateway, served.engine):
        full = {n: n + ("_total" if kind == "counter" else "") for n, kind in page.types.items()}
        types |= {full[name]: kind for name, kind in page.types.items()}
        labels |= {name: set() for name in full.values()}
        for sample, pairs in page.values:
            family = re.sub(r"_(bucket|count|sum|total)$", "", sample)
            name = full.get(sample) or full[family]
            labels.setdefault(sample, set()).update(label for label, _ in pairs)
            labels[name] |= {label for label, _ in pairs} - {"le"}
            for label, value in pairs:
                values.setdefault((name, label), set()).add(value)
    return Exposed(types, labels, values)


def documented() -> dict[str, Documented]:
    text = (MONITORING / "metrics.tsv").read_text("utf-8")
    rows = {}
    for line in text.splitlines()[1:]:
        name, kind, labels, unit, meaning = line.split("\t")
        assert unit and meaning, line
        rows[name] = Documented(kind, frozenset(re.findall(r"\w+", labels.partition(":")[0])))
    return rows


def test_the_table_has_every_metric_and_no_other_with_its_bounded_labels(exposed: Exposed) -> None:
    rows = documented()
    assert {name: row.type for name, row in rows.items()} == dict(exposed.types)
    for name, row in rows.items():
        # A counter of what has not happened yet may show no labels.
        assert exposed.labels[name] <= row.labels, name
        assert row.labels <= BOUNDED_LABELS, name
        assert len(exposed.values.get((name, "route"), ())) < 60


def test_what_alerts_and_panels_ask_for_exists_from_the_start_and_is_0(tmp_path: Path) -> None:
    """`increase` of a series that begins with its first event is 0."""
    with serve_gateway(tmp_path) as url:
        page = httpx.get(f"{url}/metrics", timeout=60).text
    for series in (
        'refused_turns_total{reason="queue_full"}',
        'retries_total{reason="lost"}',
        'refused_connections_total{reason="too_many"}',
        'reconciled_turns_total{result="lost"}',
        'loop_restarts_total{loop="drain"}',
        'conditions{kind="engine_starting",severity="warning"}',
    ):
        assert f"holdfast_gateway_{series} 0.0" in page
    assert (
        'holdfast_engine_loop_ends_total{loop="callbacks"} 0.0'
        in render(None, EngineSupervisor().ends).decode()
    )


def selectors(expression: Any) -> Iterator[promql.VectorSelector]:
    """Every selector below an expression."""
    match expression:
        case promql.VectorSelector():
            yield expression
        case promql.MatrixSelector():
            yield expression.vector_selector
        case _:
            for part in below(expression):
                yield from selectors(part)


def below(expression: Any) -> list[Any]:
    match expression:
        case promql.BinaryExpr():
            return [expression.lhs, expression.rhs]
        case promql.Call():
            return list(expression.args)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr():
            return [expression.expr]
        case promql.NumberLiteral() | promql.StringLiteral():
            return []
    raise AssertionError(f"not looked into: {expression!r}")


def groupings(expression: Any) -> Iterator[str]:
    if isinstance(expression, promql.VectorSelector | promql.MatrixSelector):
        return
    if isinstance(expression, promql.AggregateExpr) and expression.modifier is not None:
        yield from expression.modifier.labels
    for part in below(expression):
        yield from groupings(part)


def parsed(text: str) -> Any:
    return promql.parse(re.sub(r"\$__(rate_interval|range)\b", "5m", text))


def check_expression(text: str, exposed: Exposed) -> None:
    """It parses, and every metric, label and label value in it is one that is exposed."""
    rows = documented()
    known = {name for name in exposed.labels if not name.endswith("_created")} | set(ADDED_METRICS)
    expression = parsed(text)
    used = list(selectors(expression))
    assert used, text
    within: set[str] = set(ADDED_LABELS)
    for selector in used:
        assert selector.name in known, f"{selector.name} in {text}"
        family = re.sub(r"_(bucket|count|sum)$", "", selector.name)
        labels = rows[family].labels if family in rows else frozenset()
        within |= labels | ({"le"} if selector.name.endswith("_bucket") else set())
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels | ADDED_LABELS, f"{matcher.name} in {text}"
            if matcher.name == "class":
                classes = set(matcher.value.split("|"))
                assert classes <= exposed.values[selector.name, "class"] | {"output"}, text
    assert set(groupings(expression)) <= within, text


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_asks_what_is_exposed_and_says_what_to_do(exposed: Exposed) -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 20
    for rule in rules():
        check_expression(rule["expr"], exposed)
        fields = {"summary", "impact", "diagnosis", "resolution"}
        assert set(rule["annotations"]) == fields
        assert all(rule["annotations"].values())
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        for mentioned in re.findall(r"\bHoldfast\w+", " ".join(rule["annotations"].values())):
            assert mentioned in names


def test_each_kind_of_condition_has_its_alert_which_says_the_same() -> None:
    by_name = {rule["alert"]: rule for rule in rules()}
    assert len({kind.alert for kind in KINDS.values()}) == len(KINDS)
    text = (MONITORING / "alerts.yml").read_text("utf-8")
    assert monitoring.with_conditions(text) == text, "run python -m scripts.docs.monitoring"
    for name, kind in KINDS.items():
        rule = by_name[kind.alert]
        assert rule["labels"]["severity"] == kind.severity, name
        assert rule["annotations"]["resolution"] == kind.remedy, name
        metrics = {selector.name for selector in selectors(parsed(rule["expr"]))}
        if any(metric.startswith("holdfast_engine_") for metric in metrics):
            continue  # engines tell that of themselves
        assert rule["expr"] == f'holdfast_gateway_conditions{{kind="{name}"}} > 0'


def board() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text("utf-8"))
    return document


def test_every_panel_asks_what_is_exposed_and_lets_choose_an_engine_or_a_model(
    exposed: Exposed,
) -> None:
    panels = board()["panels"]
    rows = documented()
    for annotation in board()["annotations"]["list"]:
        check_expression(annotation["expr"], exposed)
    for name in ("title", "id"):
        assert len({panel[name] for panel in panels}) == len(panels) > 20
    for panel in panels:
        for target in panel["targets"]:
            check_expression(target["expr"], exposed)
            expression = parsed(target["expr"])
            within = set(groupings(expression)) | ADDED_LABELS | {"engine"}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= within, panel["title"]
            for selector in selectors(expression):
                family = re.sub(r"_(bucket|count|sum)$", "", selector.name)
                if family in rows:
                    chosen = {matcher.name for matcher in selector.matchers.matchers}
                    able = rows[family].labels & {"model", "workspace", "engine"}
                    assert able <= chosen, f"{panel['title']}: {target['expr']}"


WRITES = {name.removesuffix("_tokens") for name in WRITE_FIELDS.values()}


def expressions() -> Iterator[str]:
    """Of alerts, of the board's panels and of its annotations."""
    for rule in rules():
        yield rule["expr"]
    for panel in board()["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for annotation in board()["annotations"]["list"]:
        yield annotation["expr"]


def classes_of(selector: promql.VectorSelector) -> set[str]:
    """The classes of tokens that a selector lets through."""
    chosen = set(CLASSES)
    for matcher in selector.matchers.matchers:
        if matcher.name == "class":
            is_pattern = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
            pattern = matcher.value if is_pattern else re.escape(matcher.value)
            matched = {name for name in chosen if re.fullmatch(pattern, name)}
            is_left_out = matcher.op in (promql.MatchOp.NotRe, promql.MatchOp.NotEqual)
            chosen = chosen - matched if is_left_out else matched
    return chosen


def test_every_expression_counts_all_classes_of_ttl_or_none() -> None:
    """A hit rate that leaves out a lifetime is too high, and an alert on writes can't fire."""
    num_counted = 0
    for text in expressions():
        for selector in selectors(parsed(text)):
            if selector.name and selector.name.endswith("_tokens_total"):
                write_classes = classes_of(selector) & WRITES
                assert write_classes in (set(), WRITES), text
                num_counted += bool(write_classes)
    assert num_counted >= 8


def test_classes_in_alerts_and_board_are_those_of_the_lifetimes() -> None:
    for name in monitoring.FILES:
        text = (MONITORING / name).read_text("utf-8")
        assert monitoring.with_classes(text) == text, "run python -m scripts.docs.monitoring"


def test_alerts_and_panels_ask_for_every_path_that_runs_turns() -> None:
    routes = set(re.findall(r'route=~"([^"]+)"', json.dumps(rules()).replace("\\", "")))
    routes |= set(re.findall(r'route=~"([^"]+)"', json.dumps(board()).replace("\\", "")))
    [route] = routes
    paths = ("messages", "chat/completions", "completions", "responses")
    turns = {f"/v1/{path}" for path in paths}
    for controller in CONTROLLERS:
        base = getattr(controller, "path", None) or ""
        if base in ("/v1/models", "/v1beta/models"):
            turns |= {f"{base}/{{model_id:path}}"}
    assert len(turns) == 6
    for path in turns:
        assert re.fullmatch(route, path), path
    for path in ("/v1/models", "/metrics", "/v1/messages/count_tokens", "unknown"):
        assert not re.fullmatch(route, path), path


def sums(rows: Iterable[Row], column: str) -> int:
    return sum(row[column] for row in rows)


def prompt_tokens(row: Row) -> int:
    return sum(row[column] for label, column in CLASSES.items() if label != "output")


def test_turns_and_tokens_are_those_of_the_ledger_by_model(served: Served) -> None:
    gateway = served.gateway
    rows = served.rows
    by_outcome = Counter((row["outcome"], row["engine_model"]) for row in rows)
    assert len({model for _, model in by_outcome}) == 1
    for (outcome, model), number in by_outcome.items():
        name = "holdfast_gateway_turns_total"
        assert gateway.value(name, outcome=outcome, model=model) == number
    assert gateway.total("holdfast_gateway_turns_total") == len(rows)
    for label, column in CLASSES.items():
        count = gateway.value("holdfast_gateway_tokens_total", **{"class": label, "model": model})
        assert count == sums(rows, column), label
    assert sums(rows, "cache_read_tokens") and sums(rows, "cache_write_1h_tokens")


def test_each_histogram_has_the_values_of_the_ledgers_rows(served: Served) -> None:
    spent = [row for row in served.rows if sum(row[column] for column in CLASSES.values())]
    whole = [row for row in spent if row["decode_seconds"] is not None and row["output_tokens"] > 1]
    assert len(spent) == 16 and len(whole) == 12
    expected = {
        "turn_input_tokens": [prompt_tokens(row) for row in spent],
        "turn_output_tokens": [row["output_tokens"] for row in spent],
        "turn_seconds": [row["duration_seconds"] for row in served.rows],
        "first_token_seconds": [row["first_token_seconds"] for row in spent],
        "time_per_output_token_seconds": [
            row["decode_seconds"] / (row["output_tokens"] - 1) for row in whole
        ],
    }
    for name, values in expected.items():
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
    expected = [
        sum(row[column] for column in CLASSES.values()) - row["output_tokens"] for row in spent
    ]
    check_histogram(engine, "holdfast_engine_request_input_tokens", expected)
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
    turns = {
        dict(labels)["workspace"]: value
        for (name, labels), value in gateway.values.items()
        if name == "holdfast_gateway_workspace_turns_total"
    }
    assert turns == {"default": 5, "first": 5, "other": 10}
    for label, column in CLASSES.items():
        named = [row for row in served.rows if row["workspace_id"] == "first"]
        series_labels = {"class": label, "workspace": "first"}
        assert gateway.value("holdfast_gateway_workspace_tokens_total", **series_labels) == sums(
            named, column
        )
    silent = Metrics()
    silent.count_first_token("cold", "a model", 1.0)
    assert b"{workspace" not in silent.exposition()


DESCRIPTION = Description(
    backend="synthetic",
    model="m",
    epoch="e",
    max_context_tokens=CONTEXT_TOKENS,
    block_size=16,
    num_blocks=100,
    granularity=1,
    min_cache_tokens=1,
    capabilities=[],
    prefix_order="tools_first",
)


def test_an_endpoint_picker_reads_a_gateways_load_by_vllms_names() -> None:
    """llm-d's model-server-protocol."""
    metrics = Metrics()
    waiting = [3]
    metrics.watch(**{"vllm:num_requests_waiting": lambda: waiting[0]})
    blocks = BlockStats(total=100, free=20, active=30, leased=15, best_effort=5, cached=30)
    state = EngineState(True, False, "closed", 0, "m", DESCRIPTION, 2, blocks)
    down = state._replace(is_ready=False, num_running=1)
    metrics.show_engines({"one": state, "two": state._replace(num_running=4), "three": down})
    text = metrics.exposition().decode()
    assert "\nvllm:num_requests_waiting 3.0\n" in text
    assert "\nvllm:num_requests_running 7.0\n" in text
    assert "\nvllm:kv_cache_usage_perc 0.45\n" in text
    assert '\nvllm:cache_config_info{block_size="16",num_gpu_blocks="200"} 1.0\n' in text
    metrics.show_engines({"three": down})
    text = metrics.exposition().decode()
    assert "\nvllm:kv_cache_usage_perc 1.0\n" in text, "nobody goes where no engine is ready"
    assert "cache_config_info{" not in text


def test_what_an_engine_holds_is_told_of_engines_that_tell_it() -> None:
    metrics = Metrics()
    state = EngineState(True, False, "closed", 7, "m")
    metrics.show_engines({"one": state, "two": state._replace(is_ready=False, num_names=None)})
    text = metrics.exposition().decode()
    assert 'engine_names{engine="one"} 7.0' in text
    assert 'engine_names{engine="two"}' not in text
    assert 'engine_up{engine="two"} 0.0' in text


def test_failures_are_counted_from_none_on() -> None:
    """A share of failures is 0 then, and not unknown; and the first failure is an increase."""
    metrics = Metrics()
    metrics.show_engines({"one": EngineState(True, False, "closed", 0, "m")})
    text = metrics.exposition().decode()
    for outcome in FAULT_OUTCOMES:
        assert f'turns_total{{model="m",outcome="{outcome}"}} 0.0' in text


def stats_panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] == "stat"]


def test_a_stat_shows_this_moment_and_nothing_where_there_is_nothing() -> None:
    """A range's last value would stand for hours after a gateway died. A share of nothing is NaN,
    which the lowest threshold paints green."""
    assert len(stats_panels()) == 6
    for panel in stats_panels():
        (target,) = panel["targets"]
        assert target["instant"] and not target["range"], panel["title"]
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        if not steps:
            assert panel["fieldConfig"]["defaults"]["color"]["mode"] == "fixed", panel["title"]
        expression = parsed(target["expr"])
        if "/" in target["expr"].replace("/v1", "") or "quantile" in target["expr"]:
            while isinstance(expression, promql.AggregateExpr | promql.ParenExpr):
                expression = expression.expr
            assert isinstance(expression, promql.BinaryExpr), panel["title"]
            assert str(expression.op) == str(parsed("up >= 0").op), panel["title"]
            assert expression.rhs.val == 0


def test_engines_are_green_when_all_are_ready() -> None:
    (panel,) = (panel for panel in stats_panels() if panel["title"] == "Engines ready")
    assert "avg by (instance)" in panel["targets"][0]["expr"]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [step["value"] for step in steps if step["color"] == "green"] == [1]


def test_rates_and_times_of_alerts_are_those_of_a_model() -> None:
    """The turns of a large model would hide what ails a small one."""
    for rule in rules():
        expression = parsed(rule["expr"])
        names = {selector.name for selector in selectors(expression)}
        if names & {"holdfast_gateway_tokens_total", "holdfast_gateway_first_token_seconds_bucket"}:
            assert "model" in set(groupings(expression)), rule["alert"]


def test_the_conventions_names_have_the_same_values(served: Served) -> None:
    """OpenTelemetry's metrics for generative AI."""
    values = served.gateway.values
    same = {
        "turn_seconds": "gen_ai_server_request_duration_seconds",
        "first_token_seconds": "gen_ai_server_time_to_first_token_seconds",
        "time_per_output_token_seconds": "gen_ai_server_time_per_output_token_seconds",
        "turn_input_tokens": "gen_ai_client_token_usage",
        "turn_output_tokens": "gen_ai_client_token_usage",
    }
    for metric, name in same.items():
        for end in ("_count", "_sum", "_bucket"):
            kind = re.findall("input|output", metric) if "turn_" in metric else []
            ours = sorted(
                v for (n, _), v in values.items() if n == f"holdfast_gateway_{metric}{end}"
            )
            theirs = sorted(
                v
                for (n, labels), v in values.items()
                if n == name + end and (not kind or dict(labels)["gen_ai_token_type"] in kind)
            )
            assert ours == theirs != [], metric


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


VLLM_BOARD = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
}
"""What the panels of vLLM's board ask for (`examples/observability/prometheus_grafana`)."""
VLLM_CACHE = {
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
}


def test_vllms_names_tell_the_counts_of_the_ledger(served: Served) -> None:
    """Cache linters, autoscalers and vLLM's Grafana board read a server by these names."""
    prompts = [
        row["input_tokens"]
        + row["cache_read_tokens"]
        + sum(row[name] for name in WRITE_FIELDS.values())
        for row in served.rows
    ]
    hits = sum(row["cache_read_tokens"] + row["automatic_tokens"] for row in served.rows)
    output = sum(row["output_tokens"] for row in served.rows)
    for page in (served.gateway, served.engine):
        assert {name for name, _ in page.values} >= VLLM_CACHE
        assert page.total("vllm:prefix_cache_queries_total") == sum(prompts) > 0
        assert page.total("vllm:prompt_tokens_total") == sum(prompts)
        assert page.total("vllm:prefix_cache_hits_total") == hits > 0
        assert page.total("vllm:generation_tokens_total") == output > 0
        assert page.value("vllm:request_prompt_tokens_sum", model_name="synthetic") == sum(prompts)
    names = {name for page in (served.gateway, served.engine) for name, _ in page.values}
    assert names >= VLLM_BOARD
    for name, page in (
        ("prompt_tokens_total", served.engine),
        ("e2e_request_latency_seconds_count", served.gateway),
    ):
        assert page.value(f"vllm:{name}", model_name="synthetic") > 0


def test_vllms_names_are_left_out_by_a_setting(tmp_path: Path) -> None:
    settings = {"HOLDFAST_VLLM_METRICS": "false"}
    with running_stack(tmp_path, "synthetic", {"ENGINE_VLLM_METRICS": "false"}, settings) as stack:
        for url in (stack.gateway, stack.engine):
            page = scrape(url)
            assert page.types and not any(name.startswith("vllm:") for name in page.types)


def test_preempted_sequences_are_counted_from_when_the_gateway_saw_the_engine() -> None:
    metrics = Metrics()

    def total_of(epoch: str, number: int) -> float:
        state = EngineState(True, False, "closed", 0, model="m", epoch=epoch, num_preempted=number)
        metrics.show_engines({"engine-0": state})
        [line] = re.findall(rb"^vllm:num_preemptions_total.* (.+)$", metrics.exposition(), re.M)
        return float(line)

    assert [total_of("a", 5), total_of("a", 7), total_of("b", 1), total_of("b", 4)] == [0, 2, 2, 5]


def test_a_board_that_adds_up_all_targets_counts_tokens_once() -> None:
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    [dropped] = [
        job["metric_relabel_configs"][0]["regex"] for job in jobs if "metric_relabel_configs" in job
    ]
    told_twice = {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
    }
    told_twice |= VLLM_CACHE | {
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_generation_tokens_sum",
    }
    assert all(re.fullmatch(dropped, name) for name in told_twice)
    assert not re.fullmatch(dropped, "vllm:time_to_first_token_seconds_bucket")
