"""How long one callback keeps an engine's event loop, in CPU time, while large prompts are read."""

import asyncio
import threading
from collections.abc import Iterator

import httpx
import msgspec
import pytest
import uvicorn
from pydantic import SecretStr

from engine.__main__ import backend_factory
from engine.protocol import CountRequest, GenerateRequest, Message, Part, Prompt, Sampling, TextPart
from engine.serve.health import ServedEngine
from engine.serve.server import create_app
from engine.settings import Settings
from gateway.base.bounds import RequestBounds
from tests.gateway.serving import eventually, running
from tests.longest_callback import LONGEST_SECONDS, Longest, longest_callback

ROUNDS = 5
SECRET = "a-secret-of-some-length"
HEADERS = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture(scope="module")
def longest() -> Iterator[Longest]:
    with longest_callback() as callback:
        yield callback


@pytest.fixture(scope="module")
def url(longest: Longest) -> Iterator[str]:
    settings = Settings(
        secret=SecretStr(SECRET), backend="synthetic", synthetic_prefill_us=0, synthetic_decode_ms=0
    )
    host = ServedEngine(lambda: None)
    app = create_app(backend_factory(settings), SECRET, host)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, loop="asyncio", timeout_graceful_shutdown=2
    )
    with running(uvicorn.Server(config)) as url:
        eventually(lambda: httpx.get(f"{url}/readyz", timeout=120).status_code == 200)
        yield url


@pytest.mark.parametrize("path", ["generate", "count"])
def test_no_callback_keeps_the_loop_long_while_prompts_of_many_parts_are_read(
    url: str, longest: Longest, path: str
) -> None:
    parts: list[Part] = [TextPart("abcdefgh"[n % 8]) for n in range(RequestBounds().max_blocks)]
    prompt = Prompt([Message("user", parts)])
    statuses: list[int] = []

    def send(request_id: str) -> None:
        count = CountRequest(prompt=prompt, scope=request_id)
        request = GenerateRequest(
            request_id=request_id, scope=request_id, prompt=prompt, sampling=Sampling(max_tokens=1)
        )
        content = msgspec.json.encode(request if path == "generate" else count)
        reply = httpx.post(f"{url}/v1/{path}", content=content, headers=HEADERS, timeout=300)
        statuses.append(reply.status_code)

    send("first")  # which starts a worker
    seconds: list[float] = []
    # The best of some rounds: a busy machine only adds, by caches that others use as well.
    while len(seconds) < ROUNDS and not (seconds and min(seconds) < LONGEST_SECONDS):
        longest.reset()
        names = [f"r{len(seconds)}-{number}" for number in range(3)]
        threads = [threading.Thread(target=send, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(longest.seconds)
    assert set(statuses) == {200}
    assert 0 < min(seconds) < LONGEST_SECONDS, (seconds, longest.name)
    assert asyncio.Handle._run.__name__ == "timed"
