"""What is measured, what is written of it, and what alerts and the dashboard ask, are one thing.

The truth is what a real gateway and a real engine expose after some traffic.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.routes import CONTROLLERS
from scripts.stack import API_KEY, running_stack

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "gateway" / "monitoring"
# What Prometheus itself adds to everything that it scrapes.
# `engine` is in the targets of engines (monitoring/targets).
ADDED_LABELS = {"job", "instance", "engine"}
ADDED_METRICS = {"up": "gauge"}
# Their values are few whatever clients do: names of routes, statuses, engines, and fixed words.
BOUNDED_LABELS = {"route", "status", "reason", "outcome", "class", "cache", "engine", "stage"}
BOUNDED_LABELS |= {"result", "state", "loop", "model", "workspace"}


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
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    engine = {"ENGINE_MIN_CACHE_TOKENS": "16", "ENGINE_LOG_LEVEL": "error"}
    engine["ENGINE_STORE"] = str(tmp_path_factory.mktemp("store"))
    types: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    values: dict[tuple[str, str], set[str]] = {}
    with running_stack(tmp_path_factory.mktemp("data"), "synthetic", engine) as stack:
        for _ in range(2):
            ask(stack.gateway)
        for url in (stack.gateway, stack.engine):
            for family in text_string_to_metric_families(
                httpx.get(f"{url}/metrics", timeout=120).text
            ):
                name = family.name + ("_total" if family.type == "counter" else "")
                types[name] = family.type
                found = labels.setdefault(name, set())
                for sample in family.samples:
                    found |= set(sample.labels) - {"le"}
                    labels.setdefault(sample.name, set()).update(sample.labels)
                    for label, value in sample.labels.items():
                        values.setdefault((name, label), set()).add(value)
    return Exposed(types, labels, values)


def ask(url: str) -> None:
    """A write, then a read."""
    block = {"type": "text", "text": "A rule. " * 200, "cache_control": {"type": "ephemeral"}}
    body = {"model": "synthetic", "max_tokens": 2, "system": [block]}
    body["messages"] = [{"role": "user", "content": "q"}]
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    reply = httpx.post(f"{url}/v1/messages", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text


def documented() -> dict[str, Documented]:
    text = (MONITORING / "metrics.tsv").read_text("utf-8")
    rows = {}
    for line in text.splitlines()[1:]:
        name, kind, labels, unit, meaning = line.split("\t")
        assert unit and meaning, line
        rows[name] = Documented(kind, frozenset(re.findall(r"\w+", labels)))
    return rows


def test_the_table_has_every_metric_and_no_other(exposed: Exposed) -> None:
    rows = documented()
    assert {name: row.type for name, row in rows.items()} == dict(exposed.types)


def test_labels_are_those_of_the_table_and_bounded(exposed: Exposed) -> None:
    for name, row in documented().items():
        # A counter of what has not happened yet shows no labels.
        assert exposed.labels[name] <= row.labels, name
        assert row.labels <= BOUNDED_LABELS, name
        assert len(exposed.values.get((name, "route"), ())) < 60


def test_names_end_in_base_units(exposed: Exposed) -> None:
    for name, kind in exposed.types.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert kind != "histogram" or name.endswith(("_seconds", "_tokens")), name
        assert not re.search(r"_(ms|us|kb|mb|mib|minutes|percent)(_|$)", name), name


def selectors(expression: Any) -> Iterator[promql.VectorSelector]:
    """Every selector below an expression."""
    match expression:
        case promql.VectorSelector():
            yield expression
        case promql.MatrixSelector():
            yield expression.vector_selector
        case promql.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr():
            yield from selectors(expression.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            raise AssertionError(f"not looked into: {expression!r}")


def groupings(expression: Any) -> Iterator[str]:
    match expression:
        case promql.AggregateExpr():
            if expression.modifier is not None:
                yield from expression.modifier.labels
            yield from groupings(expression.expr)
        case promql.BinaryExpr():
            yield from groupings(expression.lhs)
            yield from groupings(expression.rhs)
        case promql.Call():
            for argument in expression.args:
                yield from groupings(argument)
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from groupings(expression.expr)


def parsed(text: str) -> Any:
    return promql.parse(re.sub(r"\$__(rate_interval|range)\b", "5m", text))


def check_expression(text: str, exposed: Exposed) -> None:
    """It parses, and every metric, label and label value in it is one that is exposed."""
    rows = documented()
    known = {name for name in exposed.labels if not name.endswith("_created")} | set(ADDED_METRICS)
    expression = parsed(text)
    found = list(selectors(expression))
    assert found, text
    within: set[str] = set(ADDED_LABELS)
    for selector in found:
        assert selector.name in known, f"{selector.name} in {text}"
        family = re.sub(r"_(bucket|count|sum)$", "", selector.name)
        labels = rows[family].labels if family in rows else frozenset()
        within |= labels | ({"le"} if selector.name.endswith("_bucket") else set())
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels | ADDED_LABELS, f"{matcher.name} in {text}"
            if matcher.name == "class":
                wanted = set(matcher.value.split("|"))
                # Workspaces have series only where a setting says so.
                if selector.name == "holdfast_gateway_workspace_tokens_total":
                    continue
                assert wanted <= exposed.values[selector.name, "class"] | {"output"}, text
    assert set(groupings(expression)) <= within, text


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_asks_what_is_exposed_and_says_what_to_do(exposed: Exposed) -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 20
    for rule in rules():
        check_expression(rule["expr"], exposed)
        said = {"summary", "impact", "diagnosis", "resolution"}
        assert set(rule["annotations"]) == said
        assert all(rule["annotations"].values())
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        for mentioned in re.findall(r"\bHoldfast\w+", " ".join(rule["annotations"].values())):
            assert mentioned in names


def test_every_panel_asks_what_is_exposed(exposed: Exposed) -> None:
    board = json.loads((MONITORING / "grafana.json").read_text("utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [one["expr"] for one in board["annotations"]["list"]]
    assert len(asked) > 30
    for expression in asked:
        check_expression(expression, exposed)
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(titles)) == len(titles) and len({p["id"] for p in board["panels"]}) == len(
        titles
    )
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = parsed(target["expr"])
            within = set(groupings(expression)) | ADDED_LABELS | {"engine"}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= within, panel["title"]


def test_prometheus_is_told_of_rules_and_jobs_that_there_are() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    told = {rule["expr"] for rule in rules()}
    asked = set(re.findall(r'job="([\w-]+)"', " ".join(told)))
    assert asked == jobs == {"holdfast-gateway", "holdfast-engine"}


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text("utf-8"))
    return found


def test_the_dashboard_has_a_row_of_figures_and_its_variables_choose(exposed: Exposed) -> None:
    panels = board()["panels"]
    figures = [panel for panel in panels if panel["type"] == "stat"]
    assert len(figures) >= 5 and {panel["gridPos"]["y"] for panel in figures} == {0}
    variables = {one["name"]: one for one in board()["templating"]["list"]}
    assert {"engine", "model", "workspace"} <= set(variables)
    asked = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    for name in ("engine", "model", "workspace"):
        query = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables[name]["definition"])
        assert query is not None and query[2] == name
        assert name in documented()[query[1]].labels
        assert f'{name}=~"${name}"' in asked
        # Prometheus takes a label that is not there for an empty one.
        assert re.fullmatch(variables[name]["allValue"], "")
    assert set(re.findall(r"\$(?!__)(\w+)", asked)) <= set(variables)


def test_panels_that_can_choose_an_engine_or_a_model_do() -> None:
    rows = documented()
    for panel in board()["panels"]:
        for target in panel["targets"]:
            for selector in selectors(parsed(target["expr"])):
                family = re.sub(r"_(bucket|count|sum)$", "", selector.name)
                if family not in rows:
                    continue
                chosen = {matcher.name for matcher in selector.matchers.matchers}
                able = rows[family].labels & {"model", "workspace", "engine"}
                assert able <= chosen, f"{panel['title']}: {target['expr']}"


def test_panels_stand_beside_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in board()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} on {taken[x, y]}"
                taken[x, y] = panel["title"]


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
