"""Requests of a hostile neighbour: `neighbours.py` measures a victim beside each of them.

Each of `KINDS` is one request kind, made as large as the gateway's bounds allow, or a little larger
where the bound itself must be cheap. Those of `FLOODS` stay far below every bound: many small
requests, and clients that do not read.
"""

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from engine.backends.prepare.schemas import MAX_SCHEMA_NESTING
from gateway.base.bounds import RequestBounds
from gateway.base.settings import Settings
from scripts.bench.load import MESSAGES, headers_of
from tests.faults.houses import CONTEXT, WORDS, text

DAY_MS = 86_400_000
BODY_BYTES: int = Settings.model_fields["body_limit_bytes"].default
CHAT = "/v1/chat/completions"
COUNT = f"{MESSAGES}/count_tokens"
BATCHES = f"{MESSAGES}/batches"
_ADMIN_READS = "usage savings latency prefixes turns/search leases overview refusals".split()
_QUIET_SECONDS = 20.0
# Levels of a schema, of each definition that is named, and of the last one.
_ROOT_LEVELS = 6
_LINK_LEVELS = 3
Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Who attacks: a workspace's own client, and its key for reading the admin API."""

    client: httpx.AsyncClient
    model: str
    bounds: RequestBounds = field(default_factory=RequestBounds)

    def message(self, prompt: Any, **changes: Any) -> Body:
        """Of Messages and of Chat Completions: a text, or content blocks."""
        messages = [{"role": "user", "content": prompt}]
        return {"model": self.model, "max_tokens": 1, "messages": messages, **changes}

    async def post(self, path: str, body: Body | bytes) -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        try:
            async with self.client.stream("POST", path, content=content, headers=headers) as reply:
                return await _read(reply)
        except httpx.TransportError:
            return 0  # refused while the body was still being sent

    async def get(self, path: str) -> int:
        async with self.client.stream("GET", path) as reply:
            return await _read(reply)

    async def on_a_socket(self, *pieces: bytes, quiet: float = 0.0) -> int:
        """The status of the first answer; 0 where there is none. `quiet`: so long nothing is read,
        and then it is over."""
        parts = urlsplit(str(self.client.base_url))
        answer = b""
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
            try:
                writer.writelines(pieces)
                if quiet:
                    await asyncio.sleep(quiet)
                    return 0
                while piece := await reader.read(1 << 16):
                    answer = answer or piece
            finally:
                writer.close()
        except OSError:
            pass
        return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0

    def head(self, *header_lines: str) -> bytes:
        lines = [
            f"POST {MESSAGES} HTTP/1.1",
            "host: x",
            f"x-api-key: {self.client.headers['x-api-key']}",
            "anthropic-version: 2023-06-01",
            "content-type: application/json",
        ]
        return "\r\n".join([*lines, *header_lines, "", ""]).encode()


async def _read(reply: httpx.Response) -> int:
    async for _ in reply.aiter_raw():
        pass
    return reply.status_code


@asynccontextmanager
async def neighbour_of(gateway: str, key: str, model: str) -> AsyncIterator[Neighbour]:
    """One with as many connections as it likes."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=gateway, headers=headers_of(key), timeout=300, limits=limits
    ) as client:
        yield Neighbour(client=client, model=model)


Attack = Callable[[Neighbour, random.Random], Awaitable[int]]
"""Send one request, read its answer to the end, return its status; 0 where the client left."""
Make = Callable[[Neighbour, random.Random], Body | bytes]


def posting(path: str, make: Make) -> Attack:
    return lambda who, rng: who.post(path, make(who, rng))


def schema_of(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def many_properties(who: Neighbour, rng: random.Random) -> Body:
    """A schema with as many properties as are allowed, for as many choices as are allowed."""
    names = [f"p{number}" for number in range(who.bounds.max_schema_properties)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    more = {"response_format": schema_of(schema), "n": who.bounds.max_choices}
    return who.message(text(rng, 4), max_tokens=16, **more)


def dropped_thinking(who: Neighbour, rng: random.Random) -> Body:
    """Thinking blocks that a template drops from history, counted and not generated."""
    blocks: list[Body] = [
        {"type": "thinking", "thinking": f"step {number} {rng.choice(WORDS)}", "signature": "s"}
        for number in range(who.bounds.max_blocks - 3)
    ]
    answer = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Well."}]}
    ends = [{"role": "user", "content": content} for content in (text(rng, 3), "And now?")]
    return {"model": who.model, "messages": [ends[0], answer, ends[1]]}


def plain_text(who: Neighbour, rng: random.Random) -> Body:
    """One text as long as a body may be: far more than the context holds."""
    once = text(rng, 2000) + " "
    return who.message(once * ((BODY_BYTES - 4096) // len(once)))


def one_letter_blocks(who: Neighbour, rng: random.Random) -> Body:
    """As many content blocks as are allowed, of one letter each."""
    letters = rng.choices("abcdefgh", k=who.bounds.max_blocks)
    return who.message([{"type": "text", "text": letter} for letter in letters])


def too_many_blocks(who: Neighbour, rng: random.Random) -> bytes:
    """As many one-letter blocks as a body can carry, which is more than are allowed."""
    block = json.dumps({"type": "text", "text": rng.choice("abcdefgh")}) + ","
    blocks = (block * ((BODY_BYTES - 4096) // len(block)))[:-1]
    return json.dumps(who.message([])).replace('"content": []', f'"content": [{blocks}]').encode()


def many_stops(who: Neighbour, rng: random.Random) -> Body:
    """As many and as long stop strings as are allowed, while tokens are made."""
    stops = [
        (f"{number:05d}" + rng.choice(WORDS) * 400)[: who.bounds.max_stop_characters]
        for number in range(who.bounds.max_stop_sequences)
    ]
    return who.message(text(rng, 20), max_tokens=128, stop_sequences=stops, stream=True)


def tools_of(who: Neighbour, rng: random.Random, schema: Body) -> list[Body]:
    """As many tools as are allowed."""
    nonce = f"{rng.getrandbits(64):x}"
    return [
        {"name": f"t{nonce}_{number}", "description": "Does it.", "input_schema": schema}
        for number in range(who.bounds.max_tools)
    ]


def many_tools(who: Neighbour, rng: random.Random) -> Body:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return who.message("go", tools=tools_of(who, rng, schema))


def counted_tools(who: Neighbour, rng: random.Random) -> Body:
    """Of a kilobyte each, counted and not generated."""
    properties = {f"p{number}": {"type": "string", "enum": ["a", "b"]} for number in range(20)}
    body = who.message("go", tools=tools_of(who, rng, {"type": "object", "properties": properties}))
    del body["max_tokens"]
    return body


def leaving(make: Make, least: float, most: float) -> Attack:
    """A client that hangs up within so many seconds."""

    async def leave(who: Neighbour, rng: random.Random) -> int:
        body = make(who, rng)
        try:
            async with asyncio.timeout(rng.uniform(least, most)):
                return await who.post(MESSAGES, body)
        except TimeoutError:
            return 0

    return leave


async def export(who: Neighbour, rng: random.Random) -> int:
    """Three years of usage as CSV, by the day."""
    since = time.time_ns() // 1_000_000 - 3 * 365 * DAY_MS
    return await who.get(f"/admin/v1/export.csv?since_ms={since}&rows=days")


async def wrong_key(who: Neighbour, rng: random.Random) -> int:
    """A key that nobody has, and that was not tried before."""
    headers = {"x-api-key": f"hf-{secrets.token_hex(24)}", "authorization": ""}
    reply = await who.client.post(MESSAGES, json=who.message("hello"), headers=headers)
    return reply.status_code


async def one_byte_chunks(who: Neighbour, rng: random.Random) -> int:
    """A body in chunks of one byte each, with a key: six times as much on the wire."""
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"model": "' + b"x" * 500_000)
    head = who.head("transfer-encoding: chunked", "connection: close")
    return await who.on_a_socket(head, body, b"0\r\n\r\n")


async def short_rows(who: Neighbour, rng: random.Random) -> int:
    """A batch of rows of a byte each; then all batches are counted."""
    rows = b",".join(b'{"custom_id": "r%d", "params": 0}' % number for number in range(10_000))
    status = await who.post(BATCHES, b'{"requests": [' + rows + b"]}")
    for _ in range(20):
        await who.get(f"{BATCHES}?limit=1000")
    return status


async def named_content(who: Neighbour, rng: random.Random) -> int:
    """A cached content as large as a body, of which few tokens are made, named again and again."""
    image = {"inlineData": {"mimeType": "image/png", "data": rng.randbytes(8_000_000).hex()}}
    parts = [{"text": text(rng, 400)}, image]
    content = {"model": f"models/{who.model}", "contents": [{"role": "user", "parts": parts}]}
    reply = await who.client.post("/v1beta/cachedContents", json=content)
    if reply.status_code != 200:
        return reply.status_code
    request = {"contents": [{"parts": [{"text": "And?"}]}], "cachedContent": reply.json()["name"]}
    request["generationConfig"] = {"maxOutputTokens": 1}
    path = f"/v1beta/models/{who.model}:generateContent"
    status = 0
    for _ in range(20):
        status = await who.post(path, request)
    await who.client.delete(f"/v1beta/{reply.json()['name']}")
    return status


def long_echo(who: Neighbour, rng: random.Random) -> Body:
    """A field of a Responses request that each event of the answer would repeat."""
    body = {"model": who.model, "input": text(rng, 3), "max_output_tokens": 1, "stream": True}
    return {**body, "user": "u" * (BODY_BYTES // 2)}


def log_probabilities(who: Neighbour, rng: random.Random) -> Body:
    """As many log probabilities in one answer as are allowed."""
    tops = 20
    choices = who.bounds.max_choices
    most = who.bounds.max_logprobs // (choices * (tops + 1))
    more = {"n": choices, "logprobs": True, "top_logprobs": tops}
    return who.message(text(rng, 4), max_tokens=most, **more)


def plan(who: Neighbour, rng: random.Random) -> Body:
    """A plan for as much traffic as may be made up."""
    traffic = {
        "tenants": 60,
        "conversations": 50,
        "turns": 20,
        "hours": 700,
        "seed": rng.randrange(9),
    }
    return {"made": traffic, "engines": 8, "host_gib": 100}


async def large_heads(who: Neighbour, rng: random.Random) -> int:
    """A list of models, asked for with as many bytes of query, trace and headers as a head has."""
    query = urlencode({f"q{number}": "%" * 20 for number in range(200)})
    headers = {f"x-{number}": f"{rng.getrandbits(64):x}" * 16 for number in range(90)}
    headers["traceparent"] = f"00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01"
    headers["tracestate"] = ",".join(f"v{number}={'x' * 20}" for number in range(300))
    headers["baggage"] = ",".join(f"k{number}=%41%42" for number in range(500))
    reply = await who.client.get(f"/v1/models?{query}", headers=headers)
    return reply.status_code


async def admin_reads(who: Neighbour, rng: random.Random) -> int:
    """What a workspace's key may read of itself, over as long a range as there is."""
    until = time.time_ns() // 1_000_000
    path = rng.choice(_ADMIN_READS)
    since = until - 3 * 365 * DAY_MS
    return await who.get(f"/admin/v1/{path}?since_ms={since}&until_ms={until}")


def moving_markers(who: Neighbour, rng: random.Random) -> Body:
    """One prompt of many blocks, whose four markers and their TTLs change with each request."""
    rules = random.Random(3)
    system: list[Body] = [{"type": "text", "text": text(rules, 12)} for _ in range(60)]
    num_long = rng.randrange(5)
    for number, place in enumerate(sorted(rng.sample(range(len(system)), 4))):
        ttl = "1h" if number < num_long else "5m"
        system[place]["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return who.message("go", max_tokens=0, system=system)


async def unread_stream(who: Neighbour, rng: random.Random) -> int:
    """A long answer, of which the client reads nothing."""
    body = json.dumps(who.message(text(rng, 4), max_tokens=400, stream=True)).encode()
    head = who.head(f"content-length: {len(body)}")
    return await who.on_a_socket(head, body, quiet=_QUIET_SECONDS)


async def short_batches(who: Neighbour, rng: random.Random) -> int:
    """A batch of one row that is cancelled and deleted at once, and its results asked for."""
    rows = {"requests": [{"custom_id": "r", "params": who.message("x")}]}
    reply = await who.client.post(BATCHES, json=rows)
    if reply.status_code != 200:
        return reply.status_code
    path = f"{BATCHES}/{reply.json()['id']}"
    for method, tail in (("POST", "/cancel"), ("GET", "/results"), ("DELETE", "")):
        await who.client.request(method, path + tail)
    return reply.status_code


async def strange_protocols(who: Neighbour, rng: random.Random) -> int:
    """Upgrades to websockets and HTTP/2, each on a connection of its own."""
    protocol = rng.choice(("websocket", "h2c"))
    headers = {"connection": "Upgrade", "upgrade": protocol, "sec-websocket-version": "13"}
    headers["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    try:
        reply = await who.client.get("/v1/models", headers=headers)
    except httpx.TransportError:
        return 0
    return reply.status_code


def chained_schemas(who: Neighbour, rng: random.Random) -> Body:
    """A schema whose definitions name one another nearly as deep as is allowed, never the same."""
    name = f"{rng.getrandbits(48):x}"
    num_links = (MAX_SCHEMA_NESTING - _ROOT_LEVELS) // _LINK_LEVELS
    definitions: dict[str, object] = {
        f"{name}{at}": {"properties": {f"p{at}": {"$ref": f"#/$defs/{name}{at + 1}"}}}
        for at in range(num_links)
    }
    definitions[f"{name}{num_links}"] = {"type": "string", "maxLength": 9}
    schema = {"$ref": f"#/$defs/{name}0", "$defs": definitions}
    return who.message(text(rng, 3), max_tokens=8, response_format=schema_of(schema))


def costly_schema(rng: random.Random, num_properties: int = 60) -> Body:
    """Integers that are multiples of primes near 100,000: 3 KB that take long to compile.

    Each of them becomes an automaton with a state for each remainder.
    """
    primes = list[int]()
    while len(primes) < num_properties:
        number = rng.randrange(90_001, 100_000, 2)
        if all(number % factor for factor in range(3, 317, 2)):
            primes.append(number)
    properties = {
        f"p{place}": {"type": "integer", "multipleOf": prime} for place, prime in enumerate(primes)
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def costly_schemas(who: Neighbour, rng: random.Random) -> Body:
    """Never the same one."""
    return who.message(text(rng, 3), max_tokens=8, response_format=schema_of(costly_schema(rng)))


KINDS: dict[str, tuple[Attack, int]] = {
    "schema, n choices": (posting(CHAT, many_properties), 1),
    "thinking that is dropped, counted": (posting(COUNT, dropped_thinking), 2),
    "plain text of a whole body": (posting(MESSAGES, plain_text), 2),
    "one-letter blocks at the bound": (posting(MESSAGES, one_letter_blocks), 1),
    "one-letter blocks beyond it": (posting(MESSAGES, too_many_blocks), 2),
    "stop strings": (posting(MESSAGES, many_stops), 1),
    "tools": (posting(MESSAGES, many_tools), 1),
    "prompts of a third of the context": (
        posting(MESSAGES, lambda who, rng: who.message(text(rng, CONTEXT // 3), max_tokens=4)),
        1,
    ),
    "hang-ups before the first token": (
        leaving(
            lambda who, rng: who.message(text(rng, CONTEXT // 4), max_tokens=64, stream=True),
            *(0.02, 0.4),
        ),
        2,
    ),
    "exports": (export, 24),
    "descriptions": (lambda who, rng: who.get("/openapi.json"), 8),
    "wrong keys": (wrong_key, 8),
    "idle sockets": (lambda who, rng: who.on_a_socket(quiet=rng.uniform(20, 40)), 1100),
    "requests in one packet": (
        lambda who, rng: who.on_a_socket(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000),
        4,
    ),
    "chunks of one byte": (one_byte_chunks, 2),
    "values for advice": (
        posting(
            "/admin/v1/advise",
            lambda who, rng: b'{"requests": [' + b"[]," * ((BODY_BYTES - 4096) // 3) + b"1]}",
        ),
        2,
    ),
    "rows of a byte": (short_rows, 8),
    "a large cached content by its name": (named_content, 2),
    "a long field that is repeated": (posting("/v1/responses", long_echo), 4),
    "log probabilities": (posting(CHAT, log_probabilities), 1),
    "plans": (posting("/admin/v1/plan", plan), 2),
}
"""An attack, and how many of it run side by side."""
FLOODS: dict[str, tuple[Attack, int]] = {
    "turns that leave the queue": (
        leaving(lambda who, rng: who.message(text(rng, 2), stream=True), 0.001, 0.03),
        100,
    ),
    "heads at their bound": (large_heads, 8),
    "reads of the admin API": (admin_reads, 24),
    "markers that move": (posting(MESSAGES, moving_markers), 4),
    "streams that nobody reads": (unread_stream, 100),
    "batches that are cancelled": (short_batches, 8),
    "upgrades": (strange_protocols, 8),
    "tools, counted": (posting(COUNT, counted_tools), 4),
    "schemas in a chain": (posting(CHAT, chained_schemas), 4),
    "costly schemas": (posting(CHAT, costly_schemas), 4),
}
