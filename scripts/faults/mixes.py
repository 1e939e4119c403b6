"""Requests that nobody listed: random mixtures of everything that a client may choose.

`attacks.py` has one request kind for each bound. Here a body is composed of several features, each
of a size that is drawn between one and its bound, or just beyond it. Others use the connection
itself: slow bodies, readers that stall, headers and lines that no server should take.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from scripts.bench.load import marked
from scripts.faults.attacks import DAY_MS, Kind, Neighbour, get, post
from scripts.faults.attacks import KINDS as ATTACKS
from scripts.faults.dialects import DIALECTS
from scripts.faults.drawing import Json, drawn_schema, leaving, size, words_of
from scripts.faults.houses import text
from tests.gateway.damage import mutant

Feature = Callable[[Neighbour, random.Random, Json], None]
"""Adds one feature to a body, in place."""


def marker(rng: random.Random) -> Json:
    return {"cache_control": {"type": "ephemeral", "ttl": rng.choice(("5m", "1h"))}}


def _system(who: Neighbour, rng: random.Random, body: Json) -> None:
    blocks = [{"type": "text", "text": text(rng, size(rng, 200))} for _ in range(size(rng, 8))]
    for block in rng.sample(blocks, min(len(blocks), rng.randrange(5))):
        block.update(marker(rng))
    body["system"] = blocks


def _long_prompt(who: Neighbour, rng: random.Random, body: Json) -> None:
    body["messages"].append({"role": "user", "content": words_of(who, rng)})


def _blocks(who: Neighbour, rng: random.Random, body: Json) -> None:
    count = size(rng, who.bounds.max_blocks)
    blocks: list[Json] = [{"type": "text", "text": rng.choice("abcd")} for _ in range(count)]
    for block in rng.sample(blocks, min(count, rng.randrange(6))):
        block.update(marker(rng))
    body["messages"].append({"role": "user", "content": blocks})


def _talk(who: Neighbour, rng: random.Random, body: Json) -> None:
    for number in range(size(rng, 400)):
        role = ("assistant", "user")[number % 2]
        body["messages"].append({"role": role, "content": text(rng, 3)})


def _tools(who: Neighbour, rng: random.Random, body: Json) -> None:
    body["tools"] = [
        {"name": f"t{number}", "description": text(rng, 4), "input_schema": drawn_schema(who, rng)}
        for number in range(size(rng, 24))
    ]
    choices = ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "t0"}, {"type": "none"})
    body["tool_choice"] = rng.choice(choices)


def _calls(who: Neighbour, rng: random.Random, body: Json) -> None:
    count = size(rng, 500)
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "t0", "input": {}} for n in range(count)]
    results = [
        {"type": "tool_result", "tool_use_id": f"c{n}", "content": "a"} for n in range(count)
    ]
    if rng.random() < 0.2:
        results.pop()
    body["messages"] += [
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results or "a"},
    ]


def _thinking(who: Neighbour, rng: random.Random, body: Json) -> None:
    if rng.random() < 0.5:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        body["max_tokens"] = 1100
        return
    blocks: list[Json] = [
        {"type": "thinking", "thinking": text(rng, 3), "signature": "s"}
        for _ in range(size(rng, 5000))
    ]
    blocks.append({"type": "text", "text": "Well."})
    body["messages"] += [{"role": "assistant", "content": blocks}, _hello(rng)]


_FEATURES: tuple[tuple[float, Feature], ...] = (
    (0.4, _system),
    (0.3, _long_prompt),
    (0.2, _blocks),
    (0.2, _talk),
    (0.3, _tools),
    (0.2, _calls),
    (0.2, _thinking),
)
_FIELDS: dict[str, tuple[float, Callable[[Neighbour, random.Random], Any]]] = {
    "output_config": (
        0.15,
        lambda who, rng: {"format": {"type": "json_schema", "schema": drawn_schema(who, rng)}},
    ),
    "stop_sequences": (0.3, lambda who, rng: _stops(who, rng)),
    "diagnostics": (
        0.2,
        lambda _, rng: {"previous_message_id": f"msg_{rng.getrandbits(112):028x}"},
    ),
    "metadata": (0.2, lambda _, rng: {"user_id": f"{rng.random()}" * size(rng, 64)}),
    "field_{nonce}": (0.05, lambda _, rng: [None] * size(rng, 50_000)),
    "model": (0.05, lambda _, rng: f"model-{rng.getrandbits(64):x}" * size(rng, 100)),
}
"""Fields of a body that depend on no other: how often each is there, and what draws it.

A field that nobody knows has another name each time.
"""


def _stops(who: Neighbour, rng: random.Random) -> list[str]:
    count = size(rng, who.bounds.max_stop_sequences)
    length = size(rng, who.bounds.max_stop_characters)
    return [f"{rng.random()}{'x' * length}"[:length] for _ in range(count)]


def composed(who: Neighbour, rng: random.Random) -> Json:
    """A body of the Messages API with a few features, of any sizes."""
    body: Json = {"model": who.model, "messages": [_hello(rng)]}
    body["max_tokens"] = size(rng, 200)
    body["stream"] = rng.random() < 0.6
    for chance, feature in _FEATURES:
        if rng.random() < chance:
            feature(who, rng, body)
    for name, (chance, draw) in _FIELDS.items():
        if rng.random() < chance:
            body[name.format(nonce=f"{rng.getrandbits(32):x}")] = draw(who, rng)
    return body


def _hello(rng: random.Random) -> Json:
    return {"role": "user", "content": text(rng, 3)}


async def mixed_messages(who: Neighbour, rng: random.Random) -> int:
    """A mixture in Messages; a few are counted and not generated, and some clients leave early."""
    body = composed(who, rng)
    if rng.random() < 0.15:
        body = {name: body[name] for name in ("model", "messages", "tools") if name in body}
        return await leaving(who, rng, "/v1/messages/count_tokens", body)
    return await leaving(who, rng, "/v1/messages", body)


async def mixed_chat(who: Neighbour, rng: random.Random) -> int:
    """A mixture in Chat Completions."""
    body: Json = {
        "model": who.model,
        "messages": [{"role": "system", "content": words_of(who, rng)}, _hello(rng)],
        "max_tokens": size(rng, 200),
        "n": rng.choice((1, 1, 2, size(rng, who.bounds.max_choices))),
        "stream": rng.random() < 0.6,
    }
    form = {"name": "form", "schema": drawn_schema(who, rng)}
    functions = [
        {
            "type": "function",
            "function": {"name": f"f{number}", "parameters": drawn_schema(who, rng)},
        }
        for number in range(size(rng, 16))
    ]
    extras: list[Json] = [
        {"stop": ["x" * size(rng, 1024)] * rng.randrange(6)},
        {"seed": rng.getrandbits(63), "temperature": rng.uniform(0, 2)},
        {"prompt_cache_key": f"{rng.random()}" * size(rng, 50)},
        {"stream_options": {"include_usage": True}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": form}},
        {"tools": functions, "tool_choice": "required"},
        {"ignore_eos": True, "min_tokens": 50},
        {"user": "u" * size(rng, 5000), "metadata": {f"{rng.random()}": "v"}},
    ]
    for extra in rng.sample(extras, rng.randrange(4)):
        body |= extra
    return await leaving(who, rng, "/v1/chat/completions", body)


async def mixed_completion(who: Neighbour, rng: random.Random) -> int:
    """A raw prompt, of up to twice the context."""
    body = {
        "model": who.model,
        "prompt": text(rng, size(rng, who.context)),
        "max_tokens": size(rng, 100),
        "n": rng.choice((1, size(rng, 16))),
        "stream": rng.random() < 0.5,
    }
    return await leaving(who, rng, "/v1/completions", body)


async def leases(who: Neighbour, rng: random.Random) -> int:
    """Four one-hour entries of prefixes that nobody sends again."""
    system = [block for _ in range(4) for block in marked(text(rng, 300), "1h")]
    body = {"model": who.model, "max_tokens": 1, "system": system, "messages": [_hello(rng)]}
    return await post(who, "/v1/messages", body)


async def damaged_body(who: Neighbour, rng: random.Random) -> int:
    """A mixture with a few of its bytes changed."""
    path = rng.choice(("/v1/messages", "/v1/chat/completions", "/v1/completions"))
    return await leaving(who, rng, path, mutant(rng, json.dumps(composed(who, rng)).encode()))


async def admin_reads(who: Neighbour, rng: random.Random) -> int:
    """Any report, of any range, with parameters that may be wrong."""
    until = time.time_ns() // 1_000_000
    report = rng.choice(
        "usage usage/groups savings latency prefixes turns turns/search overview export.csv leases"
        " engines about usage_report/messages cost_report nothing".split()
    )
    values: Json = {
        "since_ms": rng.choice((until - size(rng, 1100) * DAY_MS, 0, -1, "null", "x" * 2000)),
        "until_ms": rng.choice((until, until + 10**15)),
        "rows": rng.choice(("days", "hours", "turns")),
        "limit": rng.choice((1, 100, 10**9)),
        "by": rng.choice(("workspace", "model", "nothing")),
        "workspace": rng.choice(("default", "victim-1", "w" * 300)),
    }
    asked = rng.sample(sorted(values), rng.randrange(len(values)))
    query = urlencode([(name, values[name]) for name in asked])
    return await get(who, f"/admin/v1/{report}?{query}")


async def wrong_routes(who: Neighbour, rng: random.Random) -> int:
    """Methods and paths that there are not, or not for this key."""
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"))
    path = rng.choice(
        "/ /readyz /metrics /v1/models /v1/messages /v1/messages/batches /admin/v1/keys"
        f" /admin/v1/workspaces /{rng.random()} /v1/models/{'m' * 3000}".split()
    )
    reply = await who.client.request(method, path, content=b"{" * rng.choice((0, 10, 100_000)))
    return reply.status_code


async def odd_lines(who: Neighbour, rng: random.Random) -> int:
    """Request heads that are too long, too many, half or nonsense; then the client waits."""
    many = [b"x-%d: v\r\n" % number for number in range(size(rng, 20_000))]
    heads = (
        b"GET /" + b"a" * size(rng, 200_000) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /readyz HTTP/1.1\r\nhost: x\r\n" + b"".join(many) + b"\r\n",
        b"GET /readyz HTTP/1.1\r\nhost: x\r\nx: " + b"v" * size(rng, 500_000) + b"\r\n\r\n",
        b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n" * size(rng, 500),
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n",
        b"POST /v1/messages HTTP/1.1\r\n" + rng.randbytes(size(rng, 5000)),
    )
    return await _raw(who, rng, [rng.choice(heads)], rng.uniform(0, 3))


async def slow_body(who: Neighbour, rng: random.Random) -> int:
    """A long body that comes in small pieces, each some time after the other."""
    key = who.client.headers["x-api-key"].encode()
    length = size(rng, who.bounds.body_limit_bytes)
    head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: %b\r\n" % key
    head += b"anthropic-version: 2023-06-01\r\ncontent-length: %d\r\n\r\n" % length
    pieces = [b"a" * min(length // 10 + 1, rng.choice((1, 1000, 2_000_000)))] * 9
    return await _raw(who, rng, [head, *pieces], rng.uniform(0.1, 2))


async def stalled_reader(who: Neighbour, rng: random.Random) -> int:
    """A stream whose client reads nothing for a while and then goes."""
    body = composed(who, rng) | {"stream": True, "max_tokens": 400, "messages": [_hello(rng)]}
    try:
        async with who.client.stream("POST", "/v1/messages", json=body) as reply:
            await asyncio.sleep(rng.uniform(1, 15))
            return reply.status_code
    except httpx.TransportError:
        return 0


async def _raw(who: Neighbour, rng: random.Random, pieces: list[bytes], pause: float) -> int:
    """Send bytes with pauses between them; the status that came back, 0 without one."""
    parts = urlsplit(str(who.client.base_url))
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        return 0
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 20)
            await asyncio.sleep(pause)
        answer = await asyncio.wait_for(reader.read(64), 5)
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()
    head = answer.split(b" ")
    return int(head[1]) if len(head) > 1 and head[1].isdigit() else 0


MIXES: dict[str, Kind] = {
    "mixtures in Messages": Kind(mixed_messages, 4),
    "mixtures in Chat Completions": Kind(mixed_chat, 4),
    "mixtures in Completions": Kind(mixed_completion, 2),
    "one-hour entries": Kind(leases, 2),
    "damaged bodies": Kind(damaged_body, 4),
    "admin reads": Kind(admin_reads, 4),
    "wrong routes": Kind(wrong_routes, 4),
    "odd lines": Kind(odd_lines, 4),
    "slow bodies": Kind(slow_body, 4),
    "stalled readers": Kind(stalled_reader, 4),
}
ALL_KINDS: dict[str, Kind] = {**ATTACKS, **MIXES, **DIALECTS}
