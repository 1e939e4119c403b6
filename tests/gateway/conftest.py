from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from scripts.stack import probe
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import ADMIN_KEY, API_KEY, eventually, serve, serve_gateway


@dataclass
class Stack:
    """A gateway in front of a scripted engine, both on real sockets.

    The clients that it made are closed with it, also where a test makes a stack of its own.
    """

    url: str
    engine: ScriptedEngine
    data: Path
    sdks: list[Anthropic] = field(default_factory=list)
    openais: list[OpenAI] = field(default_factory=list)

    def http(self, key: str = API_KEY) -> httpx.Client:
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.http() as http:
            return http.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        with self.http() as http:
            return http.post(path, **options)

    def sdk(self, key: str = API_KEY) -> Anthropic:
        self.sdks.append(Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=120))
        return self.sdks[-1]

    def openai(self, key: str = API_KEY) -> OpenAI:
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)
        self.openais.append(client)
        return client

    def close(self) -> None:
        for sdk in [*self.sdks, *self.openais]:
            sdk.close()
        self.sdks.clear()
        self.openais.clear()

    def __del__(self) -> None:
        self.close()

    def admin(self, path: str) -> httpx.Response:
        with self.http(ADMIN_KEY) as http:
            return http.get(f"/admin/v1/{path}")

    def is_ready(self) -> bool:
        # Not by a client of its own: every test asks.
        return probe(f"{self.url}/readyz").ready


@contextmanager
def stacked(data: Path, *engines: ScriptedEngine, **settings: Any) -> Iterator[Stack]:
    """A stack of its own, of one engine if no other are given."""
    used = engines or (ScriptedEngine(),)
    with ExitStack() as exits:
        urls = [exits.enter_context(serve(engine)) for engine in used]
        url = exits.enter_context(serve_gateway(data, *urls, **settings))
        stack = Stack(url, used[0], data)
        exits.callback(stack.close)
        eventually(stack.is_ready)
        yield stack


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # Nothing waits for an engine that is full: these tests are about what it answers. Some send
    # hundreds of wrong keys.
    settings = {"queue_seconds": 0.0, "key_lookups_per_minute": 1_000_000}
    with stacked(tmp_path_factory.mktemp("gateway"), **settings) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """The module's servers, with the engine as new."""
    engine = shared.engine
    # What an earlier test left behind has been told to stop.
    eventually(lambda: not engine.running)
    engine.script = say("Hello", " there")
    engine.refusal = None
    engine.is_ready = True
    engine.wait_seconds = 0.0
    engine.num_heartbeats = 0
    engine.secret = ScriptedEngine.secret
    engine.is_mounted = True
    engine.entries.clear()
    stores = (engine.requests, engine.refused, engine.unheld, engine.folded, engine.inexact)
    for store in stores:
        store.clear()
    eventually(shared.is_ready)
    yield shared
    shared.close()
