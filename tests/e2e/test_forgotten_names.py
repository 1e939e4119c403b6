"""A gateway whose index is full asks likely holders before a turn goes elsewhere."""

import time
from pathlib import Path

import pytest

from gateway.routing import engine, held
from gateway.routing.held import BYTES_PER_NAME
from tests.e2e.fleet import Gateway, running_fleet
from tests.e2e.test_routing import SETTINGS, prompt
from tests.gateway.serving import eventually, metric, serve_gateway

NUM_PROMPTS = 8
NUM_OTHERS = 30
NUM_NAMES = 16
EXPECTED_SECONDS = 1.0
"""For so long what was sent counts before the engine's event."""


def test_what_was_forgotten_is_asked_for_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "EXPECTED_SECONDS", EXPECTED_SECONDS)
    # Who is asked on a busy machine answers late, and the turn would rightly not wait.
    monkeypatch.setattr(engine, "ASK_SECONDS", 30.0)
    # Load would rightly send some of the short prompts elsewhere.
    changes = {"routing_index_bytes": NUM_NAMES * BYTES_PER_NAME, "routing_load_weight": 0.0}
    with (
        running_fleet(tmp_path, 4, 0, SETTINGS) as fleet,
        serve_gateway(tmp_path, *fleet.engines, **changes) as url,
    ):
        gateway = Gateway(url, data=tmp_path)
        fleet.gateways.append(gateway)
        eventually(fleet.all_ready)
        for number in range(3):
            gateway.use(number, "drain")
        for number in range(NUM_PROMPTS):
            answer = gateway.answer(prompt(f"forgotten {number}"))
            assert answer["holdfast"]["engine"] == "engine-3"
        for number in range(3):
            gateway.use(number, "resume")
        for number in range(NUM_OTHERS):
            gateway.answer(prompt(f"other {number}", 61))
        engines = [gateway.engine(number)["routing"] for number in range(4)]
        assert sum(engine["forgotten_names"] for engine in engines) > NUM_OTHERS
        assert sum(engine["names"] for engine in engines) <= NUM_NAMES
        time.sleep(EXPECTED_SECONDS + 1)
        for number in range(NUM_PROMPTS):
            answer = gateway.answer(prompt(f"forgotten {number}"), "another question")
            assert answer["holdfast"]["engine"] == "engine-3"
            assert answer["usage"]["cache_read_input_tokens"] > 0
        series = 'holdfast_gateway_asked_engines_total{result="found"}'
        assert metric(gateway.url, series) > NUM_PROMPTS / 2
