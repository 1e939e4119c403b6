"""A gateway whose index is full asks likely holders before a turn goes elsewhere."""

import json
import re
import time
from pathlib import Path

import httpx

from gateway.routing.held import BYTES_PER_NAME, EXPECTED_SECONDS
from tests.e2e.fleet import running_fleet
from tests.e2e.test_routing import GATEWAY_SETTINGS, SETTINGS, prompt
from tests.gateway.serving import eventually

NUM_PROMPTS, NUM_OTHERS, NUM_NAMES = 8, 30, 16


def test_what_was_forgotten_is_asked_for_and_read(tmp_path: Path) -> None:
    bound = {"routing_index_bytes": NUM_NAMES * BYTES_PER_NAME}
    own = {**GATEWAY_SETTINGS, "HOLDFAST_TUNING": json.dumps(bound)}
    with running_fleet(tmp_path, 4, 1, SETTINGS, own) as fleet:
        eventually(fleet.all_ready)
        (gateway,) = fleet.gateways
        others = [f"engine-{number}" for number in range(3)]
        for name in others:
            gateway.admin(f"engines/{name}/drain", "POST")
        for number in range(NUM_PROMPTS):
            reply = gateway.ask(prompt(f"forgotten {number}"))
            assert reply.json()["holdfast"]["engine"] == "engine-3", reply.text
        for name in others:
            gateway.admin(f"engines/{name}/resume", "POST")
        for number in range(NUM_OTHERS):
            assert gateway.ask(prompt(f"other {number}", 61)).status_code == 200
        told = [gateway.engine(f"engine-{number}")["routing"] for number in range(4)]
        assert sum(engine["forgotten_names"] for engine in told) > NUM_OTHERS
        assert sum(engine["names"] for engine in told) <= NUM_NAMES
        time.sleep(EXPECTED_SECONDS + 1)
        for number in range(NUM_PROMPTS):
            reply = gateway.ask(prompt(f"forgotten {number}"), "another question")
            answer = reply.json()
            assert answer["holdfast"]["engine"] == "engine-3", reply.text
            assert answer["usage"]["cache_read_input_tokens"] > 0
        shown = httpx.get(f"{gateway.url}/metrics", timeout=60).text
        (found,) = re.findall(r'gateway_asked_engines_total{result="found"} ([0-9.]+)', shown)
        assert float(found) > NUM_PROMPTS / 2
