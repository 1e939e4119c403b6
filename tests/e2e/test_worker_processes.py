"""A gateway with two workers, as its clients and its operator meet it: real processes on one port.

`tests/gateway/limits/test_shared.py` counts the same limits with clocks that stand still, and
`python -m tests.faults.kill_gateway --workers 2` kills workers over and over.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.stack import ADMIN_KEY, Stack, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
PATH = "/v1/messages"
MAX_TOKENS = 4
ENDLESS = 100_000
"""Tokens of an answer that does not end by itself: half an hour of 20 ms each."""


@dataclass(frozen=True)
class House:
    stack: Stack
    admin: Admin

    def key(self, workspace: str, **limits: Any) -> str:
        self.admin.workspace(workspace, **limits)
        return self.admin.make_key(workspace)[1]

    def client(self, key: str) -> httpx.Client:
        """A client with one connection, which stays with one worker."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=3600)
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return httpx.Client(
            base_url=self.stack.gateway,
            headers=headers,
            limits=limits,
            timeout=300,
            trust_env=False,
        )

    @contextmanager
    def pair(self, key: str) -> Iterator[list[httpx.Client]]:
        """A client at each of the two workers. What finds them counts for another workspace."""
        with ExitStack() as stack:
            found: dict[str, httpx.Client] = {}
            while len(found) < 2:
                client = stack.enter_context(self.client(self.admin.key))
                found.setdefault(worker_of(client), client)
            for client in found.values():
                client.headers["x-api-key"] = key
            yield list(found.values())

    def workers(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.stack.gateway}/readyz", timeout=120, trust_env=False)
        workers: list[dict[str, Any]] = answer.json()["workers"]
        return workers

    def run(self) -> bool:
        return all(worker["is_running"] for worker in self.workers())

    def metric(self, name: str) -> float:
        """Zero for one that nothing was counted of."""
        return metric_at(f"{self.stack.gateway}/metrics", name)


def metric_at(url: str, name: str, client: httpx.Client | None = None) -> float:
    get = httpx.get if client is None else client.get
    found = re.findall(rf"^{re.escape(name)} (\S+)$", get(url, timeout=120).text, re.MULTILINE)
    return float(found[0]) if found else 0.0


def worker_of(client: httpx.Client) -> str:
    """The process at the other end of the client's connection, by its port there."""
    with client.stream("GET", "/healthz") as reply:
        sock = reply.extensions["network_stream"].get_extra_info("socket")
        ours = sock.getsockname()[1]
        reply.read()
    return owner_of(ours)


def owner_of(port: int) -> str:
    """The pid of the gateway's process that has the connection from `port`."""
    inode = next(
        words[9]
        for words in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        if words[2].endswith(f":{port:04X}") and words[9] != "0"
    )
    wanted = f"socket:[{inode}]"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(one) == wanted for one in (process / "fd").iterdir()):
                return process.name
        except OSError:
            continue
    raise AssertionError(f"nobody has the connection from {port}")


def asked(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "When does a lease end?"}]
    return {"model": "holdfast-demo", "max_tokens": MAX_TOKENS, "messages": messages, **changes}


def status(client: httpx.Client) -> int:
    return client.post(PATH, json=asked()).status_code


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    data = tmp_path_factory.mktemp("workers")
    with running_stack(data, "synthetic", {}, {"HOLDFAST_WORKERS": "2"}, data) as stack:
        found = House(stack, Admin(stack.gateway, ADMIN_KEY))
        eventually(found.run)
        yield found


def test_requests_of_a_minute_are_counted_over_both_workers(house: House) -> None:
    with house.pair(house.key("rate", requests_per_minute=1)) as (one, other):
        begun = time.monotonic()
        found = [status(client) for client in (one, other, one, other)]
        # One, and what came back since: none, unless the machine stood still for a minute.
        most = 1 + (time.monotonic() - begun) / 60
    assert found[0] == 200 and set(found) <= {200, 429}
    assert found.count(200) <= most


def test_turns_at_one_time_are_counted_over_both_workers(house: House) -> None:
    key = house.key("places", max_concurrency=2)
    with house.pair(key) as (one, other), house.pair(key) as others, ExitStack() as streams:
        for client in (one, other):
            body = asked(stream=True, max_tokens=ENDLESS)
            reply = streams.enter_context(client.stream("POST", PATH, json=body))
            assert reply.status_code == 200
        assert [status(client) for client in others] == [429, 429]
        streams.close()
        eventually(lambda: [status(client) for client in others] == [200, 200])


def test_money_that_was_spent_at_one_worker_is_gone_at_the_other(house: House) -> None:
    key = house.key("money")
    with house.pair(key) as (one, other):
        assert status(one) == 200
        eventually(lambda: house.admin.get("workspaces/money")["spent_nano"] > 0)
        cost = house.admin.get("workspaces/money")["spent_nano"]
        house.admin.post("workspaces/money", {"monthly_spend_nano": 3 * cost})
        found = [status(client) for client in (other, one, other, one, other)]
        assert found == [200, 200, 402, 402, 402]


def test_a_change_at_one_worker_holds_at_the_other_when_it_is_answered(house: House) -> None:
    key = house.key("changed")
    with house.pair(key) as pair, house.pair(ADMIN_KEY) as admins:
        assert [status(client) for client in pair] == [200, 200]
        for admin, state in zip(admins, (False, True), strict=True):
            what = "restore" if state else "archive"
            answer = admin.post(f"/admin/v1/workspaces/changed/{what}")
            assert answer.status_code == 200, answer.text
            assert [status(client) == 200 for client in pair] == [state, state]
        for admin, what in zip(admins, ("drain", "resume"), strict=True):
            assert admin.post(f"/admin/v1/engines/engine-0/{what}").status_code == 200
            seen = [one.get("/admin/v1/engines").json()[0]["is_draining"] for one in admins]
            assert seen == [what == "drain"] * 2


def test_the_admin_api_says_the_same_of_engines_and_exports_at_both_workers(house: House) -> None:
    span: dict[str, str | int] = {"since_ms": 0, "until_ms": 1, "rows": "days"}
    with house.pair(ADMIN_KEY) as admins:
        seen = [one.get("/admin/v1/engines").json()[0] for one in admins]
        told = [(each["breaker"], each["times_opened"]) for each in seen]
        assert told == [("closed", 0)] * 2
        # The key's one place is the parent's: the second export has it after the first.
        found = [one.get("/admin/v1/export.csv", params=span).status_code for one in admins]
        assert found == [200, 200]


def test_metrics_and_refusals_are_those_of_both_workers(house: House) -> None:
    with house.pair(house.key("counted", monthly_spend_nano=0)) as pair, ExitStack() as stack:
        name = f'holdfast_gateway_requests_total{{route="{PATH}",status="402"}}'
        assert [status(client) for client in pair] == [402, 402]
        before = house.metric(name)
        assert [status(client) for client in pair] == [402, 402]
        for client in (stack.enter_context(house.client(ADMIN_KEY)) for _ in range(3)):
            found = client.get("/admin/v1/refusals", params={"workspace": "counted"}).json()
            assert len(found) == 4
        assert house.metric(name) == before + 2
        assert house.metric("holdfast_gateway_workers") == 2


def test_a_worker_that_stands_still_holds_up_nobody(house: House) -> None:
    with house.pair(house.key("still")) as (one, other):
        pid = int(worker_of(one))
        name = f'holdfast_gateway_requests_total{{route="{PATH}",status="200"}}'
        assert [status(client) for client in (one, other)] == [200, 200]
        counted = [metric_at("/metrics", name, client) for client in (one, other)]
        assert counted[0] == counted[1]
        try:
            os.kill(pid, signal.SIGSTOP)
            assert [status(other) for _ in range(3)] == [200] * 3
            # What the one that stands still told last counts on.
            assert metric_at("/metrics", name, other) == counted[0] + 3
            answer = other.get("/readyz")
            assert answer.status_code == 200, answer.text
            still = [one for one in answer.json()["workers"] if one["is_silent"]]
            assert [(one["pid"], one["readiness"]) for one in still] == [(pid, None)]
            admin = {"x-api-key": ADMIN_KEY}
            assert other.get("/admin/v1/overview", headers=admin).status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        assert status(one) == 200
        eventually(lambda: not any(worker["is_silent"] for worker in house.workers()))


def test_a_killed_worker_comes_back_and_holds_nothing(house: House) -> None:
    """It is killed over two streams, which are all that the workspace may have."""
    key = house.key("killed", max_concurrency=2)
    name = f'holdfast_gateway_requests_total{{route="{PATH}",status="200"}}'
    counted = house.metric(name)
    with house.pair(key) as (one, other):
        pid = int(worker_of(one))
        with pytest.raises(httpx.TransportError), ExitStack() as streams:
            body = asked(stream=True, max_tokens=ENDLESS)
            second = streams.enter_context(house.client(key))
            while worker_of(second) != str(pid):
                second = streams.enter_context(house.client(key))
            replies = [
                streams.enter_context(client.stream("POST", PATH, json=body))
                for client in (one, second)
            ]
            assert [reply.status_code for reply in replies] == [200, 200]
            assert status(other) == 429
            os.kill(pid, signal.SIGKILL)
            for reply in replies:
                reply.read()
        eventually(lambda: status(other) == 200)
        eventually(house.run)
        assert [worker["restarts"] for worker in house.workers() if worker["pid"] != pid].count(1)
        assert pid not in [worker["pid"] for worker in house.workers()]

        def outcomes() -> list[str]:
            turns = house.admin.get("turns?limit=1000")
            return [each["outcome"] for each in turns if each["workspace"] == "killed"]

        eventually(lambda: outcomes().count("gateway_killed") == 2)
        assert house.metric(name) >= counted
        assert house.metric("holdfast_gateway_worker_restarts_total") == 1
    with house.pair(key) as pair:
        assert [status(client) for client in pair] == [200, 200]
