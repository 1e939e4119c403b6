"""A stream that breaks off after its 200 is a failure: in `/metrics`, alerts and the board."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.base.metrics import FAULT_OUTCOMES
from scripts.bench.load import MESSAGES, headers_of
from scripts.stack import API_KEY, ROOT
from tests.e2e.fleet import running_fleet
from tests.gateway.serving import eventually

MONITORING = ROOT / "gateway" / "monitoring"
SLOW = {"ENGINE_SYNTHETIC_DECODE_MS": "5"}
_FAILED = re.compile(r'holdfast_gateway_turns_total\{outcome=~"([^"]+)"')


def turns_by_outcome(url: str) -> dict[str, float]:
    """Of the model that the engine has."""
    page = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    return {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "holdfast_gateway_turns_total" and sample.labels["model"] == "synthetic"
    }


def asked_outcomes() -> list[set[str]]:
    """Which outcomes each alert and panel on failures counts."""
    rules = (MONITORING / "alerts.yml").read_text("utf-8")
    board = json.loads((MONITORING / "grafana.json").read_text("utf-8"))
    expressions: list[str] = [
        rule["expr"] for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]
    ]
    expressions += [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", [])
    ]
    return [set(match.split("|")) for text in expressions for match in _FAILED.findall(text)]


def test_a_stream_that_its_engines_end_cuts_is_a_turn_that_failed(tmp_path: Path) -> None:
    with running_fleet(tmp_path, 1, 1, SLOW) as fleet:
        url = fleet.gateway.url
        before = turns_by_outcome(url)
        assert {before[outcome] for outcome in FAULT_OUTCOMES} == {0}
        body: dict[str, Any] = {
            "model": "synthetic",
            "stream": True,
            "max_tokens": 4000,
            "messages": [{"role": "user", "content": "go on"}],
        }
        headers = headers_of(API_KEY)
        post = ("POST", f"{url}{MESSAGES}")
        texts = 0
        with httpx.stream(*post, json=body, headers=headers, timeout=300, trust_env=False) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                texts += "content_block_delta" in line
                if texts == 2:
                    fleet.kill()
        fleet.restart()
        eventually(lambda: turns_by_outcome(url)["api_error"] == 1)
    wanted = asked_outcomes()
    assert len(wanted) == 3, "two alerts and a panel"
    assert all(outcomes == set(FAULT_OUTCOMES) for outcomes in wanted)
