"""Every background loop of a gateway is killed once: logged, counted, started again, and at work.

What stays down is said by `/readyz`. Another supervisor stands in, whose loops can be killed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from engine import supervisor as supervision
from engine.supervisor import CountEnds, Supervisor
from gateway import app
from tests.gateway.admin_client import Admin
from tests.gateway.base.faults import FaultySupervisor
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ask, eventually, metric, serve, serve_gateway


class Gateway:
    """A gateway whose loops can be killed."""

    def __init__(self, url: str, loops: FaultySupervisor, engine: ScriptedEngine) -> None:
        self.url = url
        self.loops = loops
        self.engine = engine

    def health(self) -> tuple[int, dict[str, Any]]:
        answer = httpx.get(f"{self.url}/readyz", timeout=120)
        return answer.status_code, answer.json()

    def restarts(self, kind: str) -> float:
        return metric(self.url, f'holdfast_gateway_loop_restarts_total{{loop="{kind}"}}')

    def ask(self) -> str:
        answer = ask(self.url)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    engine = ScriptedEngine()
    supervisors = list[FaultySupervisor]()

    def make(monotonic: Callable[[], float], count_ends: CountEnds, **_: bool) -> Supervisor:
        supervisors.append(FaultySupervisor(monotonic, count_ends))
        return supervisors[0]

    monkeypatch.setattr(app, "Supervisor", make)
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        site = Gateway(url, supervisors[0], engine)
        eventually(lambda: site.health()[0] == 200)
        yield site


def test_every_loop_that_is_killed_is_started_again_and_does_its_work(gateway: Gateway) -> None:
    names = list(gateway.loops.names)
    kinds = {name.partition(" ")[0] for name in names}
    assert kinds >= {"drain", "reconcile", "keys", "spend", "prices", "poll", "watch", "follow"}
    for name in names:
        gateway.loops.kill(name)
    # An engine without events ends the loop that follows them, for good.
    alive = kinds - {"follow"}
    eventually(lambda: all(gateway.restarts(kind) == 1 for kind in alive))
    assert gateway.health()[0] == 200, "one end is no failure"
    # The drain, the reconciler, the keys and the polls still do what they are for.
    turn = gateway.ask()
    admin = Admin(gateway.url)
    eventually(lambda: turn in [t["id"] for t in admin.get("turns?limit=9")])
    admin.workspace("another")
    key_id, key = admin.make_key("another")
    assert ask(gateway.url, key=key).status_code == 200
    admin.post(f"keys/{key_id}/revoke")
    gateway.engine.is_ready = False
    eventually(lambda: gateway.health()[0] == 503)
    gateway.engine.is_ready = True
    eventually(lambda: gateway.health()[0] == 200)


def test_readiness_names_a_loop_that_ends_again_and_again(gateway: Gateway) -> None:
    gateway.loops.kill("drain", for_good=True)
    eventually(lambda: gateway.health()[0] == 503)
    (failing,) = gateway.health()[1]["loops"]
    assert failing["loop"] == "drain"
    assert failing["error"] == "InjectedError"
    assert gateway.restarts("drain") >= 2
    gateway.loops.heal()
    eventually(lambda: gateway.health()[0] == 200, supervision.STEADY_SECONDS + 60)


def test_an_end_is_logged_with_its_trace_and_without_the_values_of_its_frames(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Another test of this process may have configured it.
    structlog.reset_defaults()

    async def run() -> Counter[str]:
        counted: Counter[str] = Counter()
        again = asyncio.Event()

        async def loop(_: asyncio.Event) -> None:
            secret = "hf-" + "x" * 20
            if not counted.total():
                raise KeyError(len(secret))
            again.set()

        supervisor = Supervisor(
            asyncio.get_running_loop().time,
            lambda kind, amount: counted.update({kind: amount}),
            has_messages=True,
        )
        supervisor.start("drain of one", loop, "drain")
        async with asyncio.timeout(180):
            await again.wait()
        await supervisor.stop("drain of one")
        return counted

    assert asyncio.run(run()) == {"drain": 1}
    streams = capsys.readouterr()
    output = streams.out + streams.err
    assert "loop_ended" in output and "KeyError: 23" in output and "in loop" in output
    assert "x" * 20 not in output
