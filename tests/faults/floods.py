"""Many small requests, and clients that do not read: neighbours that stay far below every bound.

`attacks.py` has the requests that are as large as a bound allows.
"""

import asyncio
import json
import random
import time
from urllib.parse import urlencode, urlsplit

import httpx

from engine.backends.prepare.preparer import MAX_SCHEMA_NESTING
from tests.faults.attacks import DAY_MS, Kind, Neighbour, get, post
from tests.faults.houses import text

_ADMIN_READS = (
    "usage",
    "savings",
    "latency",
    "prefixes",
    "turns/search",
    "leases",
    "overview",
    "refusals",
)
_QUIET_SECONDS = 20.0
_NESTING = MAX_SCHEMA_NESTING
# Of a schema, of each definition that is named, and of the last one.
_ROOT_LEVELS, _LINK_LEVELS = 6, 3


async def leave_the_queue(who: Neighbour, rng: random.Random) -> int:
    """A turn of a few tokens, whose client leaves within an instant: mostly while it waits."""
    body = {"model": who.model, "max_tokens": 1, "stream": True}
    body["messages"] = [{"role": "user", "content": text(rng, 2)}]
    try:
        async with asyncio.timeout(rng.uniform(0.001, 0.03)):
            return await post(who, "/v1/messages", body)
    except TimeoutError:
        return 0


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
    return await get(who, f"/admin/v1/{path}?since_ms={until - 3 * 365 * DAY_MS}&until_ms={until}")


async def moving_markers(who: Neighbour, rng: random.Random) -> int:
    """One prompt of many blocks, whose four markers and their TTLs change with each request."""
    rules = random.Random(3)
    system = [{"type": "text", "text": text(rules, 12)} for _ in range(60)]
    places = sorted(rng.sample(range(len(system)), 4))
    num_long = rng.randrange(5)
    for number, place in enumerate(places):
        ttl = "1h" if number < num_long else "5m"
        system[place] |= {"cache_control": {"type": "ephemeral", "ttl": ttl}}  # type: ignore[dict-item]
    body = {"model": who.model, "max_tokens": 0, "system": system}
    body["messages"] = [{"role": "user", "content": "go"}]
    return await post(who, "/v1/messages", body)


async def unread_stream(who: Neighbour, rng: random.Random) -> int:
    """A long answer, of which the client reads nothing."""
    body = {"model": who.model, "max_tokens": 400, "stream": True}
    body["messages"] = [{"role": "user", "content": text(rng, 4)}]
    content = json.dumps(body).encode()
    head = [
        "POST /v1/messages HTTP/1.1",
        "host: x",
        f"x-api-key: {who.client.headers['x-api-key']}",
        "anthropic-version: 2023-06-01",
        "content-type: application/json",
        f"content-length: {len(content)}",
    ]
    parts = urlsplit(str(who.client.base_url))
    try:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + content)
            await asyncio.sleep(_QUIET_SECONDS)
        finally:
            writer.close()
    except OSError:
        pass
    return 0


async def short_batches(who: Neighbour, rng: random.Random) -> int:
    """A batch of one row that is cancelled and deleted at once, and its results asked for."""
    params = {"model": who.model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    made = await who.client.post(
        "/v1/messages/batches", json={"requests": [{"custom_id": "r", "params": params}]}
    )
    if made.status_code != 200:
        return made.status_code
    path = f"/v1/messages/batches/{made.json()['id']}"
    for method, tail in (("POST", "/cancel"), ("GET", "/results"), ("DELETE", "")):
        await who.client.request(method, path + tail)
    return made.status_code


async def strange_protocols(who: Neighbour, rng: random.Random) -> int:
    """Upgrades to websockets and HTTP/2, each on a connection of its own."""
    wanted = rng.choice(("websocket", "h2c"))
    headers = {"connection": "Upgrade", "upgrade": wanted, "sec-websocket-version": "13"}
    headers["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    try:
        reply = await who.client.get("/v1/models", headers=headers)
    except httpx.TransportError:
        return 0
    return reply.status_code


async def counted_tools(who: Neighbour, rng: random.Random) -> int:
    """As many tools as are allowed, of a kilobyte each, counted and not generated."""
    properties = {f"p{number}": {"type": "string", "enum": ["a", "b"]} for number in range(20)}
    schema = {"type": "object", "properties": properties}
    tools = [
        {"name": f"t{rng.getrandbits(48):x}", "description": "Does it.", "input_schema": schema}
        for _ in range(who.bounds.max_tools)
    ]
    body = {"model": who.model, "tools": tools, "messages": [{"role": "user", "content": "go"}]}
    return await post(who, "/v1/messages/count_tokens", body)


async def chained_schemas(who: Neighbour, rng: random.Random) -> int:
    """A schema whose definitions name one another nearly as deep as is allowed, never the same."""
    name = f"{rng.getrandbits(48):x}"
    num_links = (_NESTING - _ROOT_LEVELS) // _LINK_LEVELS
    made: dict[str, object] = {
        f"{name}{at}": {"properties": {f"p{at}": {"$ref": f"#/$defs/{name}{at + 1}"}}}
        for at in range(num_links)
    }
    schema = {
        "$ref": f"#/$defs/{name}0",
        "$defs": {**made, f"{name}{num_links}": {"type": "string", "maxLength": 9}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    body = {"model": who.model, "max_tokens": 8, "response_format": form}
    body["messages"] = [{"role": "user", "content": text(rng, 3)}]
    return await post(who, "/v1/chat/completions", body)


FLOODS: dict[str, Kind] = {
    "turns that leave the queue": Kind(leave_the_queue, 100),
    "heads at their bound": Kind(large_heads, 8),
    "reads of the admin API": Kind(admin_reads, 24),
    "markers that move": Kind(moving_markers, 4),
    "streams that nobody reads": Kind(unread_stream, 100),
    "batches that are cancelled": Kind(short_batches, 8),
    "upgrades": Kind(strange_protocols, 8),
    "tools, counted": Kind(counted_tools, 4),
    "schemas in a chain": Kind(chained_schemas, 4),
}
