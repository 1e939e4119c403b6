"""Attacks on the door: bytes that carry nothing, places that are held, answers that need no key.

Each is spoken on bare sockets, since no client library would send it. What has no end is sent until
the gateway closes the connection; then the attacker comes again at once.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from urllib.parse import urlsplit

from scripts.bench.load import MESSAGES
from tests.faults.attacks import CHAT, Attack, Neighbour, costly_schemas, posting

_HOLD_SECONDS = 60.0
_READ_BYTES = 1 << 16
_CHUNKED = "transfer-encoding: chunked"
_BYTE_CHUNKS = b"1\r\n \r\n" * 20_000
_LONG_EXTENSION = b"1;" + b"e" * 60_000 + b"\r\n \r\n"
_LONG_HEADERS = [f"x-{number}: {'a' * 590}" for number in range(100)]
_TRAILER = b"x-trailer: " + b"t" * 87 + b"\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
_LIVEZ = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def head(key: str | None, *header_lines: str) -> bytes:
    """Of a message, with this key or without one."""
    lines = [f"POST {MESSAGES} HTTP/1.1", "host: x", "anthropic-version: 2023-06-01"]
    lines += ["content-type: application/json", *header_lines]
    if key is not None:
        lines.append(f"x-api-key: {key}")
    return "\r\n".join([*lines, "", ""]).encode()


@asynccontextmanager
async def connected(
    who: Neighbour,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with connected_to(str(who.client.base_url)) as streams:
        yield streams


@asynccontextmanager
async def connected_to(
    url: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_in(reader: asyncio.StreamReader) -> int:
    """The status of the first answer that comes; 0 where the connection ends without one."""
    line = await reader.readline()
    return int(line.split(b" ", 2)[1]) if line.startswith(b"HTTP/") else 0


async def ask_without_key(url: str) -> int:
    """The status of a request on a connection of its own; 0 where there is none."""
    with suppress(OSError):
        async with connected_to(url) as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return await status_in(reader)
    return 0


async def say(who: Neighbour, pieces: Iterable[bytes]) -> int:
    """Send the pieces one by one until the gateway has had enough, or until there are no more and
    it has answered all and closed. Return the first status."""
    status = 0
    try:
        async with connected(who) as (reader, writer):

            async def listen() -> None:
                nonlocal status
                status = await status_in(reader)
                while await reader.read(_READ_BYTES):
                    pass

            listening = asyncio.create_task(listen())
            try:
                for piece in pieces:
                    if listening.done():
                        break
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                await listening
            finally:
                listening.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await listening
    except OSError:
        pass
    return status


def saying(pieces: Callable[[str], Iterable[bytes]], *, has_key: bool = False) -> Attack:
    """`pieces` makes what is sent of the head's first lines."""

    async def attack(who: Neighbour, rng: random.Random) -> int:
        key = who.client.headers["x-api-key"] if has_key else None
        return await say(who, pieces(key or ""))

    return attack


def endless(piece: bytes, header: str = _CHUNKED) -> Callable[[str], Iterator[bytes]]:
    return lambda key: chain([head(key or None, header)], repeat(piece))


def single_headers(key: str) -> Iterator[bytes]:
    """A head of as many headers of 100 bytes as there may be, each in a packet of its own."""
    yield head(None, "connection: close")[:-2]
    for number in range(100):
        yield b"x-%04d: " % number + b"h" * 90 + b"\r\n"
    yield b"\r\n"


def single_bytes(key: str) -> Iterator[bytes]:
    """A body that is promised and comes a byte at a time."""
    yield head(key or None, "content-length: 1000000", "connection: close")
    yield from repeat(b" ", 1_000_000)


async def pipelined(who: Neighbour, rng: random.Random) -> int:
    """As many requests at once as a connection may have waiting, again and again."""
    return await _rounds(who, _LIVEZ * 8, num_answers=8)


async def metrics_in_a_loop(who: Neighbour, rng: random.Random) -> int:
    return await _rounds(who, METRICS, num_answers=1)


async def crowd_of_reads(who: Neighbour, rng: random.Random) -> int:
    """One of many connections of a key that ask for what is answered at once."""
    return await _rounds(who, _models(who), num_answers=1)


async def crowd_of_pipelines(who: Neighbour, rng: random.Random) -> int:
    """The same with as many requests at once as a connection may have waiting."""
    return await _rounds(who, _models(who) * 8, num_answers=8)


def _models(who: Neighbour) -> bytes:
    key = who.client.headers["x-api-key"].encode()
    return b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: %b\r\n\r\n" % key


async def crowd_of_counts(who: Neighbour, rng: random.Random) -> int:
    """One of many connections of a key that send bodies."""
    return await _rounds(who, _posted(who, f"{MESSAGES}/count_tokens", {}), num_answers=1)


async def crowd_of_turns(who: Neighbour, rng: random.Random) -> int:
    """One of many connections of a key that send short turns."""
    return await _rounds(who, _posted(who, MESSAGES, {"max_tokens": 1}), num_answers=1)


async def crowd_of_refusals(who: Neighbour, rng: random.Random) -> int:
    """One of many connections of a key whose bodies are wrong."""
    return await _rounds(who, _posted(who, MESSAGES, {"max_tokens": -1}), num_answers=1)


def _posted(who: Neighbour, path: str, fields: dict[str, object]) -> bytes:
    message = {**who.message("hello"), **fields}
    if "max_tokens" not in fields:
        del message["max_tokens"]
    body = json.dumps(message).encode()
    begin = head(who.client.headers["x-api-key"], f"content-length: {len(body)}")
    return begin.replace(MESSAGES.encode(), path.encode(), 1) + body


async def _rounds(who: Neighbour, sent: bytes, num_answers: int, num_rounds: int = 30) -> int:
    """Send this again and again on one connection; return the last status."""
    status = 0
    with suppress(OSError, asyncio.IncompleteReadError):
        async with connected(who) as (reader, writer):
            for _ in range(num_rounds):
                writer.write(sent)
                for _ in range(num_answers):
                    answer = await reader.readuntil(b"\r\n\r\n")
                    status = int(answer.split(b" ", 2)[1])
                    fields = answer.lower().partition(b"content-length: ")[2]
                    await reader.readexactly(int(fields.partition(b"\r\n")[0] or 0))
    return status


async def metrics_and_away(who: Neighbour, rng: random.Random) -> int:
    """The metrics on a connection of their own, closed behind the answer."""
    return await _once(who, METRICS)


async def crowd_of_new(who: Neighbour, rng: random.Random) -> int:
    """One of many clients of a key that connect anew for each request."""
    return await _once(who, _models(who))


async def _once(who: Neighbour, sent: bytes) -> int:
    """Send this on a new connection, which the server closes; the status, 0 where there is none."""
    with suppress(OSError):
        async with connected(who) as (reader, writer):
            writer.write(sent.replace(b"host", b"connection: close\r\nhost", 1))
            status = await status_in(reader)
            while await reader.read(_READ_BYTES):
                pass
            return status
    return 0


async def connect_and_close(who: Neighbour, rng: random.Random) -> int:
    with suppress(OSError):
        async with connected(who):
            pass
    return 0


def holding(back_in_seconds: float) -> Attack:
    """A connection on which a valid key was shown, kept for as long as the gateway lets it. Who is
    refused comes again so much later, or the attack would be one on the accepting."""

    async def hold(who: Neighbour, rng: random.Random) -> int:
        status = await _hold_a_place(who)
        await asyncio.sleep(back_in_seconds)
        return status

    return hold


async def _hold_a_place(who: Neighbour) -> int:
    status = 0
    with suppress(OSError):
        async with connected(who) as (reader, writer):
            writer.write(_models(who))
            status = await status_in(reader)
            with suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_SECONDS):
                    while await reader.read(_READ_BYTES):
                        pass
    return status


async def wrong_key_anew(who: Neighbour, rng: random.Random) -> int:
    """A key that nobody has, on a connection of its own, with a body."""
    body = json.dumps(who.message("hello")).encode()
    begin = head(
        f"hf-{rng.getrandbits(160):x}", f"content-length: {len(body)}", "connection: close"
    )
    return await say(who, [begin + body])


async def long_heads(who: Neighbour, rng: random.Random) -> int:
    """A head of 60 KB without a key, on a connection of its own."""
    return await say(who, [head(None, *_LONG_HEADERS, "content-length: 0", "connection: close")])


async def options_of_admin(who: Neighbour, rng: random.Random) -> int:
    """OPTIONS of each route of the admin API, without a key."""
    described = await who.client.get("/openapi.json")
    paths = [path for path in described.json()["paths"] if path.startswith("/admin/")]
    requests = [f"OPTIONS {path} HTTP/1.1\r\nhost: x\r\n\r\n" for path in paths]
    status = 0
    for request in requests:
        status = await _rounds(who, request.encode(), num_answers=1, num_rounds=10)
    return status


ENGINE_DOORS: dict[str, tuple[Attack, int]] = {
    "the engine's door: heads of 60 KB": (long_heads, 100),
    "the engine's door: chunks of a byte without end": (saying(endless(_BYTE_CHUNKS)), 8),
    "the engine's door: connect and close": (connect_and_close, 8),
    "the engine's door: wrong keys": (wrong_key_anew, 8),
    "the engine's door: metrics in a loop": (metrics_in_a_loop, 8),
}
"""The same at the engine, past the gateway, by who does not know the secret."""
DOORS: dict[str, tuple[Attack, int]] = {
    "chunks of a byte without end, no key": (saying(endless(_BYTE_CHUNKS)), 8),
    "the same with a key": (saying(endless(_BYTE_CHUNKS), has_key=True), 8),
    "chunk extensions of 60 KB, no key": (saying(endless(_LONG_EXTENSION)), 8),
    "the same extensions with a key": (saying(endless(_LONG_EXTENSION), has_key=True), 8),
    "headers one at a time": (saying(single_headers), 8),
    "trailers without end, with a key": (
        saying(lambda key: chain([head(key, _CHUNKED), b"0\r\n"], repeat(_TRAILER)), has_key=True),
        8,
    ),
    "bytes of a body one at a time": (saying(single_bytes), 8),
    "the same bytes with a key": (saying(single_bytes, has_key=True), 8),
    "Expect and bytes of chunks": (
        saying(
            lambda key: chain([head(key, _CHUNKED, "expect: 100-continue")], repeat(b"1\r\n \r\n")),
            has_key=True,
        ),
        8,
    ),
    "requests in pipelines": (pipelined, 8),
    "heads of 60 KB, no key": (long_heads, 100),
    "costly schemas, with a key": (posting(CHAT, costly_schemas), 4),
    "OPTIONS of the admin API, no key": (options_of_admin, 8),
    "metrics in a loop": (metrics_in_a_loop, 8),
    "metrics on a connection each": (metrics_and_away, 8),
    "connect and close": (connect_and_close, 8),
    "wrong keys on a connection each": (wrong_key_anew, 8),
    "places of one key": (holding(0.2), 1200),
    "16,500 idle connections of one key": (holding(30.0), 16_500),
    "a crowd of one key: reads": (crowd_of_reads, 300),
    "a crowd of one key: on new connections": (crowd_of_new, 300),
    "a crowd of one key: pipelines": (crowd_of_pipelines, 300),
    "a crowd of one key: counts": (crowd_of_counts, 300),
    "a crowd of one key: wrong bodies": (crowd_of_refusals, 300),
    "a crowd of one key: turns": (crowd_of_turns, 300),
    **ENGINE_DOORS,
}
"""An attack, and how many of it run side by side. The victim comes anew with each question."""
