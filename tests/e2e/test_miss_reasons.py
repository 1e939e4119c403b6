"""Why a prefix was not read, in the extension and in the ledger, with real engines.

What engines find themselves is in tests/conformance."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import pytest

from scripts.stack import (
    ENGINE_SECRET,
    free_port,
    python,
    start,
    wait_until_ready,
)
from tests.e2e.prompts import handbook, marked
from tests.gateway.serving import ADMIN_KEY, API_KEY, eventually, serve_gateway

QUESTION = {"role": "user", "content": "What is a lease?"}
STEADY = {"ENGINE_NUM_BLOCKS": "4096", "ENGINE_SYNTHETIC_PREFILL_US": "0"}


@dataclass
class Machine:
    """One synthetic engine on the manual clock, which can be ended and started again."""

    settings: Mapping[str, str]
    port: int = field(default_factory=free_port)
    process: "Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {
            "ENGINE_SECRET": ENGINE_SECRET,
            "ENGINE_PORT": str(self.port),
            "ENGINE_CLOCK": "manual",
            "ENGINE_MIN_CACHE_TOKENS": "32",
            "ENGINE_SYNTHETIC_DECODE_MS": "0",
            **self.settings,
        }
        self.process = start([*python("engine"), "--backend", "synthetic"], environment)
        wait_until_ready(self.url, self.process)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def post(self, path: str, body: Any) -> None:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        httpx.post(
            f"{self.url}/v1/{path}", json=body, headers=headers, timeout=120
        ).raise_for_status()


@dataclass
class House:
    """A gateway in front of its engines."""

    url: str
    machines: list[Machine]

    def ask(self, text: str, marker: str | None = "5m", **changes: Any) -> dict[str, Any]:
        system = marked(text, marker) if marker else text
        body = {
            "model": "synthetic",
            "max_tokens": 1,
            "system": system,
            "messages": [QUESTION],
            **changes,
        }
        headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
        reply = httpx.post(f"{self.url}/v1/messages", json=body, headers=headers, timeout=120)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def reason(self, text: str, marker: str | None = "5m", **changes: Any) -> str | None:
        found: str | None = self.ask(text, marker, **changes)["holdfast"]["miss_reason"]
        return found

    def of(self, name: str) -> Machine:
        return self.machines[int(name.removeprefix("engine-"))]

    def wait_for(self, *, ready: int) -> None:
        def is_so() -> bool:
            engines = httpx.get(f"{self.url}/readyz", timeout=120).json()["engines"]
            return [engine["status"] for engine in engines].count("ready") == ready

        eventually(is_so, 300)

    def rows(self) -> list[dict[str, Any]]:
        reply = httpx.get(
            f"{self.url}/admin/v1/turns", headers={"x-api-key": ADMIN_KEY}, timeout=120
        )
        turns: list[dict[str, Any]] = reply.json()
        return turns


@contextmanager
def house(data: Path, settings: Mapping[str, str], engines: int = 1) -> Iterator[House]:
    machines = [Machine(settings) for _ in range(engines)]
    try:
        for machine in machines:
            machine.start()
        urls = [machine.url for machine in machines]
        with serve_gateway(data, *urls, engine_secret=ENGINE_SECRET) as url:
            running = House(url, machines)
            running.wait_for(ready=engines)
            yield running
    finally:
        for machine in machines:
            machine.stop()


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("steady"), STEADY) as running:
        yield running


def test_cold_then_read_and_the_ledger_says_the_same(steady: House) -> None:
    text = handbook(20)
    first, second = steady.ask(text), steady.ask(text)
    assert first["holdfast"]["miss_reason"] == "cold"
    assert second["holdfast"]["miss_reason"] is None
    assert second["usage"]["cache_read_input_tokens"] > 0
    ids = {first["id"]: "cold", second["id"]: None}
    eventually(lambda: ids.keys() <= {row["id"] for row in steady.rows()})
    rows = {row["id"]: row["miss_reason"] for row in steady.rows()}
    assert {turn_id: rows[turn_id] for turn_id in ids} == ids


def test_without_a_marker_it_is_no_breakpoint(steady: House) -> None:
    assert steady.reason(handbook(20), None) == "no_breakpoint"


def test_after_its_ttl_it_is_expired(steady: House) -> None:
    text = handbook(20)
    steady.ask(text)
    steady.machines[0].post("clock/advance", {"seconds": 301})
    assert steady.reason(text) == "ttl_expired"


def test_a_changed_tool_is_named_where_the_client_asked_to_compare(steady: House) -> None:
    text = handbook(20)
    asked: dict[str, Any] = {"previous_message_id": None}
    first = steady.ask(text, diagnostics=asked)
    asked = {"previous_message_id": first["id"]}
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    answer = steady.ask(text, diagnostics=asked, tools=tools)
    assert answer["diagnostics"]["cache_miss_reason"]["type"] == "tools_changed"
    assert answer["holdfast"]["miss_reason"] == "tools_changed"


def test_a_restarted_engine_is_told_from_a_cold_one(steady: House) -> None:
    text = handbook(20)
    steady.ask(text)
    machine = steady.machines[0]
    machine.stop()
    steady.wait_for(ready=0)
    machine.start()
    steady.wait_for(ready=1)
    assert steady.reason(text) == "engine_restart"
    assert steady.reason(text) is None
    assert steady.reason(handbook(20)) == "cold"


def test_a_prefix_that_another_engine_holds_was_routed_elsewhere(tmp_path: Path) -> None:
    with house(tmp_path, STEADY, engines=2) as two:
        text = handbook(20)
        first = two.ask(text)["holdfast"]["engine"]
        two.of(first).stop()
        two.wait_for(ready=1)
        moved = two.ask(text)["holdfast"]
        assert moved["engine"] != first
        assert moved["miss_reason"] == "routed_elsewhere"
        assert two.ask(text)["holdfast"]["miss_reason"] is None
        two.of(first).start()
        two.wait_for(ready=2)
        kept = two.ask(text)["holdfast"]
        assert (kept["engine"], kept["miss_reason"]) == (moved["engine"], None)
