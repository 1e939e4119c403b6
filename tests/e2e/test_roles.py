"""Native engines with roles behind a real gateway: one prefills, another answers."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.settings import DEMO_MODEL
from scripts.bench.load import marked
from scripts.stack import API_HEADERS
from tests.adapters import write_adapter
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.kills import PROMPT_CLASSES
from tests.e2e.prompts import handbook
from tests.e2e.test_shared_store import settings_of
from tests.gateway.serving import eventually

PREFILL = 0
DECODE = 1
ROLES = [{"ENGINE_ROLE": "prefill"}, {"ENGINE_ROLE": "decode"}]
WAIT_SECONDS = 180.0
# One running answer is enough.
GATEWAY_SETTINGS = {"HOLDFAST_TUNING": '{"routing_delay_cost": 10}'}
END_OF_TEXT = "2"
"""The demo model's token that ends an answer."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    data = tmp_path_factory.mktemp("roles")
    write_adapter(Path(DEMO_MODEL), data / "adapters" / "blue")
    settings = {**settings_of(data), "ENGINE_ADAPTERS": str(data / "adapters")}
    with running_fleet(data, 2, 1, settings, GATEWAY_SETTINGS, "native", ROLES) as running:
        yield running


@pytest.fixture
def fleet(shared: Fleet) -> Fleet:
    return shared.restored()


@contextmanager
def running_answer(fleet: Fleet) -> Iterator[None]:
    """An answer that goes on at the engine that decodes."""
    gateway = fleet.gateway
    stopping = threading.Event()
    begun = threading.Event()
    body = {
        "model": gateway.model,
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 12_000,
        "stream": True,
        "logit_bias": {END_OF_TEXT: -100},
    }

    def read() -> None:
        url = f"{gateway.url}/v1/chat/completions"
        with (
            httpx.Client(timeout=600, trust_env=False, headers=API_HEADERS) as http,
            http.stream("POST", url, json=body) as reply,
        ):
            for _ in reply.iter_lines():
                begun.set()
                if stopping.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            assert begun.wait(WAIT_SECONDS)
            assert fleet.stats(DECODE)["running"] == 1
            yield
        finally:
            stopping.set()
            reading.exception(WAIT_SECONDS)
    eventually(lambda: is_idle(fleet), WAIT_SECONDS)


def is_idle(fleet: Fleet) -> bool:
    """Nothing runs, no block is in use, and everything was acknowledged, where an engine is up."""
    up = [number for number, process in enumerate(fleet.processes) if process.poll() is None]
    return all(
        not (stats["running"] or stats["waiting"] or stats["unacknowledged"])
        and not stats["blocks"]["active"]
        for stats in map(fleet.stats, up)
    )


def computed(fleet: Fleet) -> list[int]:
    """Prompt tokens that each engine has computed."""
    return [fleet.stats(number)["counters"]["computed_tokens"] for number in (PREFILL, DECODE)]


def ask(gateway: Gateway, system: str, *, stream: bool = False) -> dict[str, Any]:
    """The answer as it began; a stream's usage of the prompt is in its first event."""
    reply = gateway.ask(marked(system, "1h"), "Why?", temperature=0.0, stream=stream)
    assert reply.status_code == 200 and "event: error" not in reply.text, reply.text
    answer: dict[str, Any]
    if stream:
        first = next(line for line in reply.text.splitlines() if line.startswith("data: {"))
        answer = json.loads(first[6:])["message"]
    else:
        answer = reply.json()
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_new_prompt_is_prefilled_by_one_engine_answered_by_another(
    fleet: Fleet, stream: bool
) -> None:
    gateway = fleet.gateway
    system = handbook(160)
    with running_answer(fleet):
        before = computed(fleet)
        answer = ask(gateway, system, stream=stream)
        prefilled, decoded = (now - then for now, then in zip(computed(fleet), before, strict=True))
        usage = answer["usage"]
        holdfast = answer["holdfast"]
        written_tokens = usage["cache_creation_input_tokens"]
        assert holdfast["engine"] == "engine-1"
        assert written_tokens > 2500 and usage["cache_read_input_tokens"] == 0
        assert prefilled == written_tokens + usage["input_tokens"], "each token is counted once"
        # What ends inside a block, and what the breakpoint does not cover.
        assert 0 < decoded <= usage["input_tokens"] + 16
        assert holdfast["computed_tokens"] == prefilled + decoded
        assert holdfast["miss_reason"] == "cold" and "read_tier" not in holdfast
        assert [point["missed"] for point in holdfast["breakpoints"]] == ["cold"]
        assert fleet.stats(DECODE)["store"]["peer_read_bytes"] > 0
        row = gateway.recorded(answer["id"])
        assert row["engine"] == "engine-1"
        assert [row[name] for name in PROMPT_CLASSES] == [
            usage["input_tokens"],
            0,
            0,
            written_tokens,
        ]
        assert row["computed_tokens"] == prefilled + decoded

        # It is there now: one engine answers.
        then = computed(fleet)
        again = ask(gateway, system)
        assert again["usage"]["cache_read_input_tokens"] == written_tokens
        assert again["holdfast"]["engine"] == "engine-1" and computed(fleet)[0] == then[0]
    if not stream:
        assert again["content"] == answer["content"]


def test_a_chat_completion_in_two_legs_says_the_same(fleet: Fleet) -> None:
    gateway = fleet.gateway
    system = handbook(160)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]
    with running_answer(fleet):
        before = computed(fleet)
        reply = gateway.send("/v1/chat/completions", messages=messages, max_tokens=4)
        usage = reply.json()["usage"]
        prefilled = computed(fleet)[0] - before[0]
    assert prefilled == usage["prompt_tokens"] > 2500
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_adapter_reads_in_the_second_leg_what_it_wrote_in_the_first(fleet: Fleet) -> None:
    gateway = fleet.gateway
    system = handbook(160)
    with running_answer(fleet):
        before = computed(fleet)
        blue = replace(gateway, model=f"{gateway.model}:blue")
        first = ask(blue, system)
        prefilled, decoded = (now - then for now, then in zip(computed(fleet), before, strict=True))
        written_tokens = first["usage"]["cache_creation_input_tokens"]
        assert prefilled == written_tokens + first["usage"]["input_tokens"] > 2500
        assert 0 < decoded <= first["usage"]["input_tokens"] + 16
        again = ask(blue, system)
        assert again["usage"]["cache_read_input_tokens"] == written_tokens
        base = ask(gateway, system)
    assert again["content"] == first["content"] != base["content"]
    assert base["usage"]["cache_read_input_tokens"] == 0


def test_short_prompts_go_straight_to_the_engine_that_decodes(fleet: Fleet) -> None:
    with running_answer(fleet):
        before = computed(fleet)
        answer = ask(fleet.gateway, handbook(20))
        assert answer["holdfast"]["engine"] == "engine-1"
        assert computed(fleet)[0] == before[0] and answer["holdfast"]["computed_tokens"] > 200


@pytest.mark.parametrize("killed", [PREFILL, DECODE])
def test_a_kill_of_either_engine_fails_no_turn(fleet: Fleet, killed: int) -> None:
    gateway = fleet.gateway
    system = handbook(400)
    with running_answer(fleet), ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, gateway, system)
        eventually(lambda: fleet.stats(PREFILL)["running"] == 1, WAIT_SECONDS)
        fleet.kill(killed)
        answer = future.result(WAIT_SECONDS)
        usage = answer["usage"]
        assert answer["stop_reason"] in ("max_tokens", "end_turn")
        assert answer["holdfast"]["engine"] == f"engine-{1 - killed}"
        assert usage["cache_creation_input_tokens"] > 6000
        row = gateway.recorded(answer["id"])
        written_tokens = usage["cache_creation_input_tokens"]
        assert [row[name] for name in PROMPT_CLASSES] == [
            usage["input_tokens"],
            0,
            0,
            written_tokens,
        ]
        assert row["outcome"] in ("length", "stop")


def test_a_client_that_leaves_in_the_first_leg_pays_what_was_computed(fleet: Fleet) -> None:
    gateway = fleet.gateway
    system = handbook(400)
    before = {row["id"] for row in gateway.get("turns?limit=1000")}
    with running_answer(fleet):
        body = {
            "model": gateway.model,
            "max_tokens": 8,
            "stream": True,
            "system": marked(system, "1h"),
            "messages": [{"role": "user", "content": "Why?"}],
        }
        with (
            httpx.Client(timeout=600, trust_env=False, headers=API_HEADERS) as http,
            http.stream("POST", f"{gateway.url}/v1/messages", json=body),
        ):
            eventually(lambda: fleet.stats(PREFILL)["running"] == 1, WAIT_SECONDS)

        def left() -> list[dict[str, Any]]:
            rows = [row for row in gateway.get("turns?limit=1000") if row["id"] not in before]
            return [row for row in rows if row["outcome"] == "client_disconnect"]

        eventually(left)
        (row,) = left()
        assert row["engine"] == "engine-0"
        assert sum(row[name] for name in PROMPT_CLASSES) == row["computed_tokens"] > 0
        eventually(lambda: fleet.stats(PREFILL)["running"] == 0, WAIT_SECONDS)
