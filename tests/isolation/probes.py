"""Probing for what another workspace has cached: the requests, and all that can be seen of them.

Bodies go over a plain HTTP client, so that the whole answer is compared, to the byte, but for what
differs in any two requests.
"""

import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

MODEL = "holdfast-demo"
UNKNOWN_TURN = "msg_" + 28 * "0"
# scripts/long_tests isolation raises it.
NUM_PROBES = int(os.environ.get("ISOLATION_PROBES", "40"))
ENGINE = {
    "ENGINE_MIN_CACHE_TOKENS": "32",
    "ENGINE_LOG_LEVEL": "warning",
    # All that the probes write fits into the lease budget: a full one shows in every answer.
    "ENGINE_NUM_BLOCKS": str(max(8192, 66 * NUM_PROBES)),
}
KINDS = {"ENGINE_APPROXIMATE": "true"}

_UNKNOWN = '"cache_miss_reason":null'
# What any two requests differ in: ids, times, and whose key it is.
_VOLATILE = (
    (re.compile(r"\b(msg|req|chatcmpl)[_-][0-9a-zA-Z]+"), "ID"),
    (re.compile(r'"created":\s*\d+'), '"created":0'),
    # The two words for a turn that is not known: it was looked for in time, or not yet.
    (re.compile(r'"cache_miss_reason":\{"type":"previous_message_not_found"\}'), _UNKNOWN),
    (re.compile(r'"expires_in_seconds":\s*[0-9.e-]+'), '"expires_in_seconds":0'),
)
_VOLATILE_HEADERS = {"date", "request-id", "x-request-id", "anthropic-workspace-id"}


@dataclass(frozen=True, slots=True)
class Shape:
    """How a probe asks: everything that an attacker may choose. `keeps`: the marker asks for a
    compressed prefix. `places`: the prefix is a document that stands anywhere."""

    dialect: str
    stream: bool
    marked: bool
    compares: bool = False
    keeps: bool = False
    places: bool = False

    def __str__(self) -> str:
        words = [self.dialect, "stream" if self.stream else "whole"]
        words += ["marked"] * self.marked + ["compares"] * self.compares + ["keeps"] * self.keeps
        words += ["places"] * self.places
        return " ".join(words)


SHAPES = [
    Shape(dialect, stream, marked, compares)
    for dialect in ("messages", "chat")
    for stream in (False, True)
    for marked in (True, False)
    for compares in ((False, True) if dialect == "messages" else (False,))
]
PLACING_SHAPES = [Shape("messages", stream, marked=True, places=True) for stream in (False, True)]
KEEPING_SHAPES = [
    Shape(dialect, stream, marked=True, keeps=True)
    for dialect in ("messages", "chat")
    for stream in (False, True)
]


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a client sees of one request but its time; `read` came out of memory."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: str
    read: int
    written: int
    turn: str


def words(rng: random.Random, number: int) -> str:
    """Made-up words: no other text has them, so that no cache of words can know them either."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(number))


def body_of(
    shape: Shape, prefix: str, question: str, *, previous: str = UNKNOWN_TURN
) -> dict[str, Any]:
    kind = {"holdfast": {"keep": 0.5, "scorer": "keydiff"}} if shape.keeps else {}
    mark = {"cache_control": {"type": "ephemeral", **kind}} if shape.marked else {}
    system: Any = [{"type": "text", "text": prefix, **mark}]
    body: dict[str, Any] = {"model": MODEL, "stream": shape.stream, "temperature": 0}
    body["max_tokens"] = 2
    user: dict[str, Any] = {"role": "user", "content": question}
    if shape.places:
        place = {"cache_control": {"type": "ephemeral", "holdfast": {"block": "anywhere"}}}
        document = {"type": "text", "text": prefix, **place}
        # The question first: every probe has the document behind another text.
        block = {"type": "text", "text": question}
        user["content"] = [block, document, {"type": "text", "text": "What is it?"}]
        return body | {"messages": [user]}
    if shape.dialect == "messages":
        body |= {"system": system, "messages": [user]}
        if shape.compares:
            body["diagnostics"] = {"previous_message_id": previous}
        return body
    body["messages"] = [{"role": "system", "content": system}, user]
    if shape.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def path_of(shape: Shape) -> str:
    return "/v1/messages" if shape.dialect == "messages" else "/v1/chat/completions"


def ask(client: httpx.Client, shape: Shape, body: dict[str, Any]) -> Seen:
    """One request to its end, which must be good, and what can be seen of it."""
    response = client.post(path_of(shape), json=body)
    assert response.status_code == 200, response.text
    text = response.text
    usage = _usage(shape, text)
    details = usage.get("prompt_tokens_details") or {}
    match = re.search(r'"id":\s*"([^"]+)"', text)
    assert match is not None
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    headers = {k: v for k, v in response.headers.items() if k not in _VOLATILE_HEADERS}
    headers.pop("content-length", None)  # of a time that is left, in more or fewer digits
    return Seen(
        status=response.status_code,
        headers=tuple(sorted(headers.items())),
        body=text,
        read=usage.get("cache_read_input_tokens", details.get("cached_tokens", 0)),
        written=usage.get("cache_creation_input_tokens", details.get("cache_write_tokens", 0)),
        turn=match[1],
    )


def _usage(shape: Shape, text: str) -> dict[str, Any]:
    if not shape.stream:
        usage: dict[str, Any] = json.loads(text)["usage"]
        return usage
    usage = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            counts = event.get("usage") or event.get("message", {}).get("usage")
            usage |= {k: v for k, v in (counts or {}).items() if v is not None}
    return usage


def client_of(gateway: str, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    return httpx.Client(base_url=gateway, headers=headers, timeout=120)


@dataclass(slots=True)
class Exact:
    """What came of a number of exact probes; `hints` are the differences, one line each."""

    probes: int = 0
    stranger_reads: int = 0
    owner_reads: int = 0
    hints: list[str] | None = None


def probe_exactly(
    owner: httpx.Client,
    stranger: httpx.Client,
    reference: httpx.Client,
    number: int,
    shapes: Sequence[Shape] = SHAPES,
    seed: int = 0,
) -> Exact:
    """Each prefix: cold by `reference`, warmed by the owner, probed by the stranger and the owner.

    The three are of three workspaces. The stranger must see what the reference saw.
    """
    rng = random.Random(seed)
    result = Exact(hints=[])
    assert result.hints is not None
    for index in range(number):
        shape = shapes[index % len(shapes)]
        warming = replace(shape, stream=False, marked=True, compares=False)
        is_long = shape.keeps or shape.places
        prefix = words(rng, 120 if is_long else 30)
        question = words(rng, 3)
        cold = ask(reference, shape, body_of(shape, prefix, question))
        warm = ask(owner, warming, body_of(warming, prefix, words(rng, 3)))
        assert warm.read == 0 and warm.written > 32
        probed = ask(stranger, shape, body_of(shape, prefix, question, previous=warm.turn))
        again = ask(owner, shape, body_of(shape, prefix, question))
        result.probes += 1
        result.stranger_reads += probed.read > 0
        owners = again.read if shape.marked or shape.dialect == "chat" else _automatic(again.body)
        result.owner_reads += owners > 0
        for name in ("status", "headers", "body"):
            theirs = getattr(cold, name)
            ours = getattr(probed, name)
            if theirs != ours:
                result.hints.append(f"{shape}: {name}: {theirs!r} became {ours!r}")
    return result


def _automatic(body: str) -> int:
    """Unmarked, on the Messages API: what was reused is in the extension."""
    match = re.search(r'"automatic_tokens":\s*(\d+)', body)
    return int(match[1]) if match else 0
