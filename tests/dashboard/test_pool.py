"""The pool's figures are the same on Overview, Fleet and Memory as in the engines' `/metrics`."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from scripts.bench.load import MESSAGES, body_of, headers_of, marked
from scripts.stack import ADMIN_KEY, API_KEY, serving_engine, serving_gateway
from tests.dashboard.signed_in import open_page, sign_in


@dataclass(frozen=True)
class Pools:
    gateway: str
    blocks: list[dict[str, float]]

    def share(self, *states: str) -> float:
        """Of all engines' blocks, those in these states."""
        own = sum(each[state] for each in self.blocks for state in states)
        return own / sum(sum(each.values()) for each in self.blocks)


def blocks_of(engine: str) -> dict[str, float]:
    text = httpx.get(f"{engine}/metrics", timeout=60).text
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("kv_blocks"):
            found = {sample.labels["state"]: sample.value for sample in family.samples}
    return found


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with ExitStack() as stack:
        settings = {"ENGINE_NUM_BLOCKS": "2000"}
        engines = [
            stack.enter_context(serving_engine("synthetic", settings)).wait() for _ in range(2)
        ]
        urls = [engine.url for engine in engines]
        data = tmp_path_factory.mktemp("pools")
        gateway = stack.enter_context(serving_gateway(data, urls)).wait()
        with httpx.Client(base_url=gateway.url, timeout=120, trust_env=False) as http:
            for number in range(12):
                text = f"{number} " + "The lamp is lit at dusk. " * (150 * (1 + number % 4))
                body = body_of("synthetic", marked(text, "1h"), "Hi", max_tokens=2)
                http.post(MESSAGES, json=body, headers=headers_of(API_KEY)).raise_for_status()
        yield Pools(gateway.url, [blocks_of(url) for url in urls])


def card(app: AppTest, label: str) -> str:
    return next(str(metric.value) for metric in app.metric if metric.label == label)


def test_pages_and_metrics_agree(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = pools.share("active", "leased")
    assert 0.05 < in_use < 0.95, "so that a wrong formula shows"
    shown = formats.percent(in_use)
    sign_in(monkeypatch, pools.gateway, ADMIN_KEY)
    overview, memory, fleet = (open_page(name) for name in ("overview", "memory", "fleet"))
    assert card(overview, "Pool in use") == card(memory, "Pool in use") == shown
    assert card(memory, "Leased") == formats.percent(pools.share("leased"))
    said = " ".join(str(each.value) for each in fleet.markdown)
    assert re.search(rf"{re.escape(shown)} of their KV memory is in use", said)
    each = [
        (one["active"] + one["leased"]) / sum(one.values())
        for one in sorted(pools.blocks, key=lambda one: one["leased"])
    ]
    for app in (overview, fleet):
        table = next(t.value for t in app.dataframe if "Pool in use" in t.value.columns)
        assert sorted(table["Pool in use"]) == pytest.approx(each, abs=5.1e-4)
