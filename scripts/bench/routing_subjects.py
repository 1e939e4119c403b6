"""Who is measured by `scripts.bench.routing`: our gateway in its modes, and other people's routers.

What is set besides addresses stands in `SUBJECTS` and in `routers.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.bench.routers import Router, litellm, rust_router
from scripts.bench.routing_load import Marks
from scripts.stack import (
    API_KEY,
    ENGINE_SECRET,
    Process,
    Readiness,
    free_port,
    serving,
    serving_engine,
    serving_gateway,
    wait_for,
)


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """`urls` are asked in turn, with `key`; `processes` are what was started."""

    urls: list[str]
    key: str
    processes: list[Process]


@dataclass(frozen=True, slots=True)
class Ours:
    """`marks` are what the client sends, `events` whether routing follows the engines' events.

    A client that marks nothing gets leases by the gateway's policy where `leases`. There are
    `gateways` with a journal and a ledger each, and `workers` of each gateway.
    """

    marks: Marks
    events: bool = True
    leases: bool = True
    gateways: int = 1
    workers: int = 1
    is_ours: bool = True

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[RunningRouter]:
        settings = {
            "HOLDFAST_ROUTING_EVENTS": str(self.events).lower(),
            "HOLDFAST_LOG_LEVEL": "warning",
            **({} if self.leases else {"HOLDFAST_AUTO_CACHE": "off"}),
            "HOLDFAST_WORKERS": str(self.workers),
        }
        with ExitStack() as stack:
            servers = []
            for i in range(self.gateways):
                data, log = folder / f"data-{i}", folder / f"gateway-{i}.log"
                servers.append(stack.enter_context(serving_gateway(data, engines, settings, log)))
            urls = [server.wait().url for server in servers]
            yield RunningRouter(urls, API_KEY, [server.process for server in servers])


@dataclass(frozen=True, slots=True)
class Peer:
    router: Router
    marks: Marks = "none"
    is_ours: bool = False

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[RunningRouter]:
        """Raises StartError where it ends or does not get ready."""
        port, log, key = free_port(), folder / "peer.log", self.router.key
        command = self.router.command(port, engines, folder)
        with serving(command, self.router.environment, port, log=log) as server:
            wait_for(lambda: _passes_on(server.url, key), server.process, log)
            yield RunningRouter([server.url], key, [server.process])


def _passes_on(url: str, key: str) -> Readiness:
    """Whether a request gets through: some routers listen before they know their workers."""
    body = {"model": "synthetic", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20)
    except httpx.TransportError as error:
        return Readiness(False, repr(error))
    return Readiness(answer.status_code == 200, answer.text[:200])


@contextmanager
def running_engines(number: int, num_blocks: int, folder: Path) -> Iterator[list[str]]:
    """Fresh synthetic engines: the defaults but for the pool's size."""
    settings = {"ENGINE_NUM_BLOCKS": str(num_blocks), "ENGINE_LOG_LEVEL": "warning"}
    module = "scripts.bench.openai_engine"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                serving_engine("synthetic", settings, folder / f"engine-{i}.log", module=module)
            )
            for i in range(number)
        ]
        yield [server.wait().url for server in servers]


def _router(name: str, policy: str = "cache_aware") -> Peer:
    return Peer(rust_router(name, policy, key=ENGINE_SECRET))


def _litellm(marks: Marks = "none", **settings: object) -> Peer:
    return Peer(litellm("synthetic", key=ENGINE_SECRET, settings=settings), marks)


SUBJECTS: dict[str, Ours | Peer] = {
    "ours, events": Ours("none"),
    "ours, events, marked": Ours("conversation"),
    "ours, events, no leases": Ours("none", leases=False),
    "ours, learned": Ours("none", events=False),
    "ours, learned, marked": Ours("conversation", events=False),
    "sglang-router": _router("sglang-router"),
    "vllm-router": _router("vllm-router"),
    "smg": _router("smg"),
    "litellm": _litellm(),
    "litellm, prompt_caching": _litellm("system", optional_pre_call_checks=["prompt_caching"]),
    "round robin": _router("sglang-router", "round_robin"),
}
TWO_GATEWAYS: dict[str, Ours | Peer] = {
    "ours, events": Ours("none"),
    "ours, events, two gateways": Ours("none", gateways=2),
    "ours, events, two workers": Ours("none", workers=2),
    "ours, events, marked": Ours("conversation"),
    "ours, events, marked, two gateways": Ours("conversation", gateways=2),
    "ours, events, marked, two workers": Ours("conversation", workers=2),
    "ours, learned": Ours("none", events=False),
    "ours, learned, two gateways": Ours("none", events=False, gateways=2),
    "ours, learned, two workers": Ours("none", events=False, workers=2),
}
