"""Requests at the bound of what one client may ask for: what a hostile or unlucky neighbour sends.

Each attack is one request kind, made as large as the gateway's bounds allow, or a little larger
where the bound itself must be cheap. `neighbours.py` measures a victim beside each of them.
"""

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from gateway.base.bounds import RequestBounds
from gateway.base.settings import Settings
from scripts.bench.load import headers_of
from tests.faults.houses import CONTEXT, WORDS, text

DAY_MS = 86_400_000
BODY_BYTES: int = Settings.model_fields["body_limit_bytes"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Who attacks: a workspace's own client, and its key for reading the admin API."""

    client: httpx.AsyncClient
    model: str
    bounds: RequestBounds
    context: int


@asynccontextmanager
async def neighbour_of(gateway: str, key: str, model: str) -> AsyncIterator[Neighbour]:
    """One with as many connections as it likes."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=gateway, headers=headers_of(key), timeout=300, limits=limits
    ) as client:
        yield Neighbour(client=client, model=model, bounds=RequestBounds(), context=CONTEXT)


Attack = Callable[[Neighbour, random.Random], Awaitable[int]]
"""Send one request, read its answer to the end, return its status; 0 where the client left."""


async def many_properties(who: Neighbour, rng: random.Random) -> int:
    """A schema with as many properties as are allowed, for as many choices as are allowed."""
    names = [f"p{number}" for number in range(who.bounds.max_schema_properties)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    body = _chat(who, rng, max_tokens=16, response_format=form)
    return await post(who, "/v1/chat/completions", body | {"n": who.bounds.max_choices})


async def dropped_thinking(who: Neighbour, rng: random.Random) -> int:
    """Thinking blocks that a template drops from history, counted and not generated."""
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": f"step {number} {rng.choice(WORDS)}", "signature": "s"}
        for number in range(who.bounds.max_blocks - 3)
    ]
    messages = [
        {"role": "user", "content": text(rng, 3)},
        {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Well."}]},
        {"role": "user", "content": "And now?"},
    ]
    return await post(who, "/v1/messages/count_tokens", {"model": who.model, "messages": messages})


async def plain_text(who: Neighbour, rng: random.Random) -> int:
    """One text as long as a body may be: far more than the context holds."""
    once = text(rng, 2000) + " "
    long = once * ((BODY_BYTES - 4096) // len(once))
    return await post(who, "/v1/messages", _message(who, long, max_tokens=1))


async def whole_context(who: Neighbour, rng: random.Random) -> int:
    """A cold prompt that fills most of the context."""
    return await post(who, "/v1/messages", _message(who, text(rng, who.context // 3), max_tokens=4))


async def one_letter_blocks(who: Neighbour, rng: random.Random) -> int:
    """As many content blocks as are allowed, of one letter each."""
    blocks = [
        {"type": "text", "text": rng.choice("abcdefgh")} for _ in range(who.bounds.max_blocks)
    ]
    messages = [{"role": "user", "content": blocks}]
    return await post(who, "/v1/messages", _message(who, "", max_tokens=1, messages=messages))


async def too_many_blocks(who: Neighbour, rng: random.Random) -> int:
    """As many one-letter blocks as a body can carry, which is more than are allowed."""
    one = json.dumps({"type": "text", "text": rng.choice("abcdefgh")}) + ","
    blocks = (one * ((BODY_BYTES - 4096) // len(one)))[:-1]
    head = json.dumps(_message(who, "", max_tokens=1, messages=[]))[:-3]
    body = f'{head}[{{"role":"user","content":[{blocks}]}}]}}'
    return await post(who, "/v1/messages", body.encode())


async def many_stops(who: Neighbour, rng: random.Random) -> int:
    """As many and as long stop strings as are allowed, while tokens are made."""
    stops = [
        (f"{number:05d}" + rng.choice(WORDS) * 400)[: who.bounds.max_stop_characters]
        for number in range(who.bounds.max_stop_sequences)
    ]
    body = _message(who, text(rng, 20), max_tokens=128, stop_sequences=stops, stream=True)
    return await post(who, "/v1/messages", body)


async def many_tools(who: Neighbour, rng: random.Random) -> int:
    """As many tools as are allowed."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    nonce = f"{rng.getrandbits(64):x}"
    tools = [
        {"name": f"t{nonce}_{number}", "description": "Does it.", "input_schema": schema}
        for number in range(who.bounds.max_tools)
    ]
    return await post(who, "/v1/messages", _message(who, "go", max_tokens=1, tools=tools))


async def leave_early(who: Neighbour, rng: random.Random) -> int:
    """A long cold prompt whose client hangs up before the first token."""
    body = _message(who, text(rng, who.context // 4), max_tokens=64, stream=True)
    try:
        async with asyncio.timeout(rng.uniform(0.02, 0.4)):
            return await post(who, "/v1/messages", body)
    except TimeoutError:
        return 0


async def export(who: Neighbour, rng: random.Random) -> int:
    """Three years of usage as CSV, by the day."""
    until = time.time_ns() // 1_000_000
    return await get(who, f"/admin/v1/export.csv?since_ms={until - 3 * 365 * DAY_MS}&rows=days")


async def describe(who: Neighbour, rng: random.Random) -> int:
    """The whole description of the API, which needs no key."""
    return await get(who, "/openapi.json")


async def wrong_key(who: Neighbour, rng: random.Random) -> int:
    """A key that nobody has, and that was not tried before."""
    headers = {"x-api-key": f"hf-{secrets.token_hex(24)}", "authorization": ""}
    body = _message(who, "hello", max_tokens=1)
    reply = await who.client.post("/v1/messages", json=body, headers=headers)
    return reply.status_code


async def idle_socket(who: Neighbour, rng: random.Random) -> int:
    """A connection that says nothing."""
    parts = urlsplit(str(who.client.base_url))
    try:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        return 0
    try:
        await asyncio.sleep(rng.uniform(20, 40))
    finally:
        writer.close()
    return 0


async def pipelined(who: Neighbour, rng: random.Random) -> int:
    """Thousands of requests in one packet, without a key."""
    return await _on_a_socket(who, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000)


async def one_byte_chunks(who: Neighbour, rng: random.Random) -> int:
    """A body in chunks of one byte each, with a key: six times as much on the wire."""
    head = [
        "POST /v1/messages HTTP/1.1",
        "host: x",
        f"x-api-key: {who.client.headers['x-api-key']}",
        "anthropic-version: 2023-06-01",
        "content-type: application/json",
        "transfer-encoding: chunked",
        "connection: close",
    ]
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"model": "' + b"x" * 500_000)
    return await _on_a_socket(who, "\r\n".join([*head, "", ""]).encode() + body + b"0\r\n\r\n")


async def values_for_advice(who: Neighbour, rng: random.Random) -> int:
    """A body of the admin API with millions of values."""
    values = b"[]," * ((BODY_BYTES - 4096) // 3)
    return await post(who, "/admin/v1/advise", b'{"requests": [' + values + b"1]}")


async def short_rows(who: Neighbour, rng: random.Random) -> int:
    """A batch of rows of a byte each; then all batches are counted."""
    row = b'{"custom_id": "r%d", "params": 0}'
    rows = b",".join(row % number for number in range(10_000))
    status = await post(who, "/v1/messages/batches", b'{"requests": [' + rows + b"]}")
    for _ in range(20):
        await get(who, "/v1/messages/batches?limit=1000")
    return status


async def named_content(who: Neighbour, rng: random.Random) -> int:
    """A cached content as large as a body, of which few tokens are made, named again and again."""
    image = {"inlineData": {"mimeType": "image/png", "data": rng.randbytes(8_000_000).hex()}}
    parts = [{"text": text(rng, 400)}, image]
    content = {"model": f"models/{who.model}", "contents": [{"role": "user", "parts": parts}]}
    made = await who.client.post("/v1beta/cachedContents", json=content)
    if made.status_code != 200:
        return made.status_code
    asked = {"contents": [{"parts": [{"text": "And?"}]}], "cachedContent": made.json()["name"]}
    asked["generationConfig"] = {"maxOutputTokens": 1}
    path, status = f"/v1beta/models/{who.model}:generateContent", 0
    for _ in range(20):
        status = await post(who, path, asked)
    await who.client.delete(f"/v1beta/{made.json()['name']}")
    return status


async def long_echo(who: Neighbour, rng: random.Random) -> int:
    """A field of a Responses request that each event of the answer would repeat."""
    body = {"model": who.model, "input": text(rng, 3), "max_output_tokens": 1, "stream": True}
    long = "u" * (BODY_BYTES // 2)
    return await post(who, "/v1/responses", {**body, "user": long})


async def log_probabilities(who: Neighbour, rng: random.Random) -> int:
    """As many log probabilities in one answer as are allowed."""
    tops, choices = 20, who.bounds.max_choices
    most = who.bounds.max_logprobs // (choices * (tops + 1))
    body = _chat(who, rng, max_tokens=most, n=choices, logprobs=True, top_logprobs=tops)
    return await post(who, "/v1/chat/completions", body)


async def plan(who: Neighbour, rng: random.Random) -> int:
    """A plan for as much traffic as may be made up."""
    made = {"tenants": 60, "conversations": 50, "turns": 20, "hours": 700, "seed": rng.randrange(9)}
    return await post(who, "/admin/v1/plan", {"made": made, "engines": 8, "host_gib": 100})


@dataclass(frozen=True, slots=True)
class Kind:
    """An attack, and how many of it run side by side."""

    attack: Attack
    at_once: int


KINDS: dict[str, Kind] = {
    "schema, n choices": Kind(many_properties, 1),
    "thinking that is dropped, counted": Kind(dropped_thinking, 2),
    "plain text of a whole body": Kind(plain_text, 2),
    "one-letter blocks at the bound": Kind(one_letter_blocks, 1),
    "one-letter blocks beyond it": Kind(too_many_blocks, 2),
    "stop strings": Kind(many_stops, 1),
    "tools": Kind(many_tools, 1),
    "prompts of a third of the context": Kind(whole_context, 1),
    "hang-ups before the first token": Kind(leave_early, 2),
    "exports": Kind(export, 24),
    "descriptions": Kind(describe, 8),
    "wrong keys": Kind(wrong_key, 8),
    "idle sockets": Kind(idle_socket, 1100),
    "requests in one packet": Kind(pipelined, 4),
    "chunks of one byte": Kind(one_byte_chunks, 2),
    "values for advice": Kind(values_for_advice, 2),
    "rows of a byte": Kind(short_rows, 8),
    "a large cached content by its name": Kind(named_content, 2),
    "a long field that is repeated": Kind(long_echo, 4),
    "log probabilities": Kind(log_probabilities, 1),
    "plans": Kind(plan, 2),
}


def _message(who: Neighbour, prompt: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt or "x"}]
    return {"model": who.model, "messages": messages, **changes}


def _chat(who: Neighbour, rng: random.Random, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text(rng, 4)}]
    return {"model": who.model, "messages": messages, **changes}


async def post(who: Neighbour, path: str, body: dict[str, Any] | bytes) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    try:
        async with who.client.stream("POST", path, content=content, headers=headers) as reply:
            async for _ in reply.aiter_raw():
                pass
            return reply.status_code
    except httpx.TransportError:
        return 0  # refused while the body was still being sent


async def _on_a_socket(who: Neighbour, sent: bytes) -> int:
    """The status of the first answer; 0 where there is none."""
    parts = urlsplit(str(who.client.base_url))
    answer = b""
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(sent)
            while piece := await reader.read(1 << 16):
                answer = answer or piece
        finally:
            writer.close()
    except OSError:
        pass
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


async def get(who: Neighbour, path: str) -> int:
    async with who.client.stream("GET", path) as reply:
        async for _ in reply.aiter_raw():
            pass
        return reply.status_code
