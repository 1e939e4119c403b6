"""A relay between a client and the gateway that keeps what was asked and what was answered.

Neither side sees a difference but the port: bytes pass as they came, in both directions.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, web

from scripts.stack import HOST

# They belong to one connection, not to the message (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length"}
MAX_BODY_BYTES = 64 << 20
KEPT_ANSWER_BYTES = 2_000
REFUSED = 400
COUNTS = ("count_tokens", "countTokens", "input_tokens")
"""How the paths end that count a prompt's tokens: no turns."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and how it was answered; `began` is the beginning of the answer's body."""

    method: str
    path: str
    status: int
    body: bytes
    began: bytearray

    @property
    def is_refused(self) -> bool:
        return self.status >= REFUSED

    @property
    def answer(self) -> str:
        return self.began.decode(errors="replace")

    @property
    def has_tools(self) -> bool:
        """Whether the request offers tools: the turns of an agent do, those for a title do not."""
        try:
            request: Any = json.loads(self.body)
        except ValueError:
            return False
        is_count = self.path.endswith(COUNTS)
        return not is_count and isinstance(request, dict) and bool(request.get("tools"))


class Relay:
    """Passes requests on to `target`. The exchanges stand in the order in which answers began."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._breaks: dict[int, Callable[[], None]] = {}
        self._lock = asyncio.Lock()

    @property
    def num_turns(self) -> int:
        """Requests with tools that were not refused."""
        return sum(exchange.has_tools and not exchange.is_refused for exchange in self.exchanges)

    def before_turn(self, number: int, act: Callable[[], None]) -> None:
        """Call `act` once, when so many requests with tools have been answered and one comes."""
        self._breaks[number] = act

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with self._lock:
            act = self._breaks.pop(self.num_turns + 1, None)
            if act is not None:
                await asyncio.to_thread(act)
        sent = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        timeout = ClientTimeout(total=None)
        async with (
            ClientSession(
                auto_decompress=False, cookie_jar=DummyCookieJar(), timeout=timeout
            ) as session,
            session.request(
                request.method,
                self.target + request.raw_path,
                headers=sent,
                data=body,
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            ) as answer,
        ):
            reply_headers = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=reply_headers
            )
            exchange = Exchange(request.method, request.path, answer.status, body, bytearray())
            self.exchanges.append(exchange)
            # A client may leave as soon as it has read the last event.
            with suppress(ConnectionResetError):
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    exchange.began.extend(chunk[: KEPT_ANSWER_BYTES - len(exchange.began)])
                    await response.write(chunk)
                await response.write_eof()
            return response


@contextmanager
def relaying(target: str) -> Iterator[Relay]:
    """A relay on a free port of loopback, in a thread with an event loop of its own."""
    relay = Relay(target)
    loop = asyncio.new_event_loop()
    is_ready = threading.Event()

    async def begin() -> web.AppRunner:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", relay.pass_on)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        relay.url = f"http://{HOST}:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(begin())
        is_ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    is_ready.wait()
    try:
        yield relay
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
