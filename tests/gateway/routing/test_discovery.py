"""Engines that are found: by a fake of Kubernetes' API that lists and watches, and by a name."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from gateway.base.settings import engine_list
from gateway.routing.discovery import EndpointSlices, ListedEngine, SourceFailed, source_of
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import ADMIN_KEY, ask, eventually, serve, serve_gateway

PATH = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"


@dataclass
class FakeApi:
    """`oldest` is the first version that a watch may begin behind; `pause` comes before a list.

    `token` is asked for where it is set. `num_cut` grows to end all watches.
    """

    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    version: int = 1
    oldest: int = 0
    pause: float = 0.0
    token: str = ""
    service: str = "engines"
    num_cut: int = 0
    num_lists: int = 0
    num_stale: int = 0

    def put(self, name: str, url: str = "", **endpoint: Any) -> None:
        """One slice with one endpoint, or none without a URL."""
        host, _, port = url.removeprefix("http://").partition(":")
        ends = [{"addresses": [host], "conditions": {"ready": True}, **endpoint}] if url else []
        fields = {"endpoints": ends, "ports": [{"name": "http", "port": int(port or 0)}]}
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.change(kind, name, fields)

    def change(self, kind: str, name: str, fields: dict[str, Any]) -> None:
        self.version += 1
        fields = {**fields, "metadata": {"name": name, "resourceVersion": str(self.version)}}
        self.slices[name] = fields
        if kind == "DELETED":
            del self.slices[name]
        self.events.append((self.version, {"type": kind, "object": fields}))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        parameters = parse_qs(scope["query_string"].decode())
        assert scope["path"] == PATH
        assert parameters["labelSelector"] == [f"kubernetes.io/service-name={self.service}"]
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.token and authorization != f"Bearer {self.token}":
            return await self._answer(send, 401, {})
        if "watch" in parameters:
            return await self._watch(send, int(parameters["resourceVersion"][0]))
        await asyncio.sleep(self.pause)
        self.num_lists += 1
        meta = {"resourceVersion": str(self.version)}
        await self._answer(send, 200, {"metadata": meta, "items": [*self.slices.values()]})

    async def _answer(self, send: Any, status: int, body: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def _watch(self, send: Any, version: int) -> None:
        async def line(event: Any) -> None:
            data = json.dumps(event).encode() + b"\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": []})
        if version < self.oldest:
            self.num_stale += 1
            gone = {"kind": "Status", "code": 410, "reason": "Expired"}
            await line({"type": "ERROR", "object": gone})
        else:
            cut = self.num_cut
            ends = time.monotonic() + 60
            bookmark = {"metadata": {"resourceVersion": str(version)}}
            await line({"type": "BOOKMARK", "object": bookmark})
            while cut == self.num_cut and time.monotonic() < ends:
                for at, event in [change for change in self.events if change[0] > version]:
                    version = at
                    await line(event)
                await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b""})


@dataclass
class House:
    api: FakeApi
    url: str

    def engines(self) -> dict[str, tuple[str, bool]]:
        headers = {"x-api-key": ADMIN_KEY}
        listing = httpx.get(f"{self.url}/admin/v1/engines", headers=headers, timeout=60).json()
        return {engine["name"]: (engine["status"], engine["is_draining"]) for engine in listing}

    def ask(self) -> int:
        return ask(self.url, model="scripted").status_code


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    api = FakeApi()
    with serve(api) as address:
        entry = f"kubernetes://prod/engines?api={address}"
        with serve_gateway(tmp_path, engines=(entry,), queue_seconds=0) as url:
            yield House(api, url)


def pod(name: str, **conditions: bool) -> dict[str, Any]:
    return {"targetRef": {"kind": "Pod", "name": name}, "conditions": conditions}


def test_an_engine_that_comes_is_used_when_ready_and_one_that_goes_drains(house: House) -> None:
    assert house.engines() == {} and house.ask() == 404  # no engine serves the model
    scripted = ScriptedEngine(is_ready=False, script=say("slow", "er", delay=1.5), epoch="one")
    with serve(scripted) as url, ThreadPoolExecutor() as threads:
        house.api.put("a", url, **pod("engine-0"))
        eventually(lambda: house.engines() == {"engine-0": ("starting", False)})
        scripted.is_ready = True
        eventually(lambda: house.engines() == {"engine-0": ("ready", False)})
        turn = threads.submit(house.ask)
        eventually(lambda: scripted.running)
        # Its pod is told to end: what runs there ends there, and nothing new begins.
        house.api.put("a", url, **pod("engine-0", ready=False, serving=True, terminating=True))
        eventually(lambda: house.engines() == {"engine-0": ("ready", True)})
        house.api.put("a")
        assert house.ask() in (503, 529)
        assert house.engines() == {"engine-0": ("ready", True)}
        assert turn.result() == 200
        eventually(lambda: house.engines() == {})


def test_changes_are_told_over_cut_watches_and_versions_that_are_too_old(house: House) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(serve(ScriptedEngine(epoch=f"e{n}"))) for n in range(3)]
        house.api.put("a", urls[0], **pod("engine-0"))
        eventually(lambda: "engine-0" in house.engines())
        # A watch that ends goes on behind its last event, without a list.
        lists = house.api.num_lists
        house.api.num_cut += 1
        house.api.put("b", urls[1], **pod("engine-1"))
        eventually(lambda: "engine-1" in house.engines())
        assert house.api.num_lists == lists
        # 410 Gone: what the watch missed is in the next list.
        house.api.num_cut += 1
        house.api.change("DELETED", "a", house.api.slices["a"])
        house.api.put("c", urls[2], **pod("engine-2"))
        house.api.oldest = house.api.version
        house.api.events = []
        eventually(lambda: {*house.engines()} == {"engine-1", "engine-2"})
        assert (house.api.num_stale, house.api.num_lists) == (1, lists + 1)


def test_a_pod_that_is_replaced_keeps_its_name(house: House) -> None:
    with serve(ScriptedEngine(epoch="one")) as old, serve(ScriptedEngine(epoch="two")) as new:
        house.api.put("a", old, **pod("engine-0"))
        eventually(lambda: "engine-0" in house.engines())
        house.api.put("a", new, **pod("engine-0"))

        def is_new() -> bool:
            headers = {"x-api-key": ADMIN_KEY}
            engines = httpx.get(f"{house.url}/admin/v1/engines", headers=headers, timeout=60).json()
            return [engine["url"] for engine in engines] == [new]

        eventually(is_new)


def test_an_api_that_is_away_or_slow_changes_nothing(tmp_path: Path) -> None:
    api = FakeApi(pause=3.0)
    with serve(ScriptedEngine()) as engine:
        api.put("a", engine, **pod("engine-0"))
        with serve(api) as address:
            entry = f"kubernetes://prod/engines?api={address}"
            gateway = serve_gateway(tmp_path, engines=(entry,), queue_seconds=0)
            url = gateway.__enter__()
            began = time.monotonic()
            assert House(api, url).ask() == 404  # answered while the list is on its way
            assert time.monotonic() - began < 3.0 or api.num_lists
            eventually(lambda: "engine-0" in House(api, url).engines())
            api.num_cut += 1
        for _ in range(20):  # the API is gone
            assert House(api, url).ask() == 200
            time.sleep(0.1)
        assert House(api, url).engines() == {"engine-0": ("ready", False)}
        gateway.__exit__(None, None, None)


def test_a_name_is_asked_for_its_addresses(tmp_path: Path) -> None:
    with serve(ScriptedEngine()) as engine:
        port = engine.rpartition(":")[2]
        with serve_gateway(tmp_path, engines=(f"dns://localhost:{port}",)) as url:
            house = House(FakeApi(), url)
            eventually(lambda: house.engines().get(f"127.0.0.1:{port}") == ("ready", False))
            assert house.ask() == 200


async def first(source: Any) -> list[ListedEngine]:
    async for engines in source.changes():
        return list(engines)
    raise AssertionError


def test_ports_paths_and_addresses_of_a_slice(tmp_path: Path) -> None:
    api = FakeApi(token="secret-1")
    ends = [
        {"addresses": ["fd00::7"], "conditions": {}},
        {"addresses": ["10.0.0.9"], "conditions": {"terminating": True}},
    ]
    ports = [{"name": "metrics", "port": 9000}, {"name": "api", "port": 8000}]
    api.change("ADDED", "a", {"endpoints": ends, "ports": ports})
    api.change("ADDED", "b", {"endpoints": [{"addresses": ["10.0.0.9"]}], "ports": ports})
    api.change("ADDED", "c", {"endpoints": None, "ports": None})
    with serve(api) as address:
        source = source_of(f"kubernetes://prod/engines:api/holdfast?api={address}")
        assert isinstance(source, EndpointSlices)
        source.account = tmp_path
        with pytest.raises(SourceFailed, match="401"):
            asyncio.run(first(source))
        (tmp_path / "token").write_text("secret-1\n")
        changes = asyncio.run(first(source))
    assert [(change.place.url, change.is_leaving) for change in changes] == [
        ("http://[fd00::7]:8000/holdfast", False),
        ("http://10.0.0.9:8000/holdfast", False),
    ]


@pytest.mark.parametrize(
    "entry",
    [
        "kubernetes://prod",
        "kubernetes:///engines",
        "kubernetes://prod/Engines",
        "kubernetes://prod/engines?token=x",
        "dns://engines",
        "dns://:8100",
        "dns://engines:port",
    ],
)
def test_a_wrong_source_is_refused_by_its_number(entry: str) -> None:
    with pytest.raises(ValueError, match="entry 2 must be kubernetes://NAMESPACE/SERVICE"):
        engine_list(f"http://one:8100,{entry}")
    assert engine_list("dns://engines:8100/holdfast, kubernetes://p/e:http") == (
        "dns://engines:8100/holdfast",
        "kubernetes://p/e:http",
    )
