"""The dimensions of the other dialects, of batches and of advice that are doubled."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from gateway.advice import pasted
from gateway.advice.pasted import advise_request
from gateway.advice.stream import advise_stream
from gateway.base.bounds import DEFAULT_BOUNDS as BOUNDS
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.dialects.gemini import lower as gemini
from gateway.dialects.gemini.request import decode_generate
from gateway.dialects.responses.lower import prepare
from gateway.dialects.responses.request import decode_responses
from gateway.dialects.responses.response import echo_of
from gateway.http.batch_rows import RowReader, ranked
from gateway.prompt.ask import Ask
from tests.doubling import Dimension, Work
from tests.gateway.doubling_requests import ASKED, MODEL, PRINCIPAL, dimensions, read_by

Json = dict[str, Any]
_BLOCKS = BOUNDS.max_blocks - 16
_CHARACTERS = pasted.MAX_CHARACTERS
_HI = {"role": "user", "content": "hi"}
_SAID = {"role": "user", "parts": [{"text": "hi"}]}


def _responses(body: Json) -> Work:
    def decode(raw: bytes) -> Ask:
        given = decode_responses(raw)
        msgspec.json.encode(echo_of(given.fields))
        return prepare(given, ASKED).ask

    return read_by(decode, {"input": [_HI], **body})


def _gemini(body: Json) -> Work:
    def decode(raw: bytes) -> Ask:
        return gemini.ask_of(decode_generate(raw, "m"), ASKED, stream=False)

    return read_by(decode, {"contents": [_SAID], **body})


def _batch(rows: list[Json]) -> Work:
    reader = RowReader(
        bounds=BOUNDS,
        find_model=lambda _: MODEL,
        removes_nonces=True,
        unreadable="placeholder",
        auto_cache_messages=False,
        most_rows=len(rows),
        clock=Clock(),
    )
    given = [{"custom_id": str(n), "params": row} for n, row in enumerate(rows)]
    raw = msgspec.json.encode({"requests": given})
    return lambda: ranked(reader, raw, PRINCIPAL, "2023-06-01")


def _advice(requests: list[Any]) -> Work:
    def work() -> None:
        with suppress(GatewayError):
            turns = []
            for number, given in enumerate(requests):
                found = pasted.read(given)
                turns.append(pasted.observation_of(found, number, number, None))
                msgspec.json.encode(advise_request(found, turns[-1], 1))
            advise_stream(turns, 1)

    return work


def _calls(count: int, *, named: bool) -> Json:
    """As many calls in one turn, answered in the next in the opposite order."""
    ids = [{"id": f"c{n}"} if named else {} for n in range(count)]
    calls = [{"functionCall": {"name": f"f{n}", **one}} for n, one in enumerate(ids)]
    answers = [
        {"functionResponse": {"name": f"f{n}", "response": {"output": "a"}, **ids[n]}}
        for n in reversed(range(count))
    ]
    turns = [{"role": "model", "parts": calls}, {"role": "user", "parts": answers}]
    return {"contents": [_SAID, *turns]}


def _items(count: int) -> Json:
    calls = [
        {"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"}
        for n in range(count)
    ]
    outputs = [
        {"type": "function_call_output", "call_id": f"c{n}", "output": "a"}
        for n in reversed(range(count))
    ]
    return {"input": [_HI, *calls, *outputs]}


def _allowed(count: int) -> Json:
    tools = [{"type": "function", "name": f"t{n}", "parameters": {}} for n in range(count)]
    allowed = [{"type": "function", "name": f"t{n}"} for n in range(count)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    return {"tools": tools, "tool_choice": choice}


def _declared(count: int) -> Json:
    schema = {"type": "OBJECT", "properties": {f"p{n}": {"type": "STRING"} for n in range(8)}}
    declared = [{"name": f"t{n}", "parameters": schema} for n in range(count)]
    return {"tools": [{"functionDeclarations": declared}]}


def _talk(count: int) -> Json:
    roles = ["user", "assistant"] * (count // 2) + ["user"]
    return {"model": "m", "messages": [{"role": role, "content": "a"} for role in roles]}


_RESPONSES = {
    "parts": (
        _BLOCKS,
        lambda n: {"input": [{"role": "user", "content": [_part("input_text")] * n}]},
    ),
    "calls and outputs": (_BLOCKS // 2, _items),
    "allowed tools": (BOUNDS.max_tools, _allowed),
    "bytes of a tool of the vendor's": (
        1 << 21,
        lambda n: {"tools": [{"type": "web_search", "more": "a" * n}]},
    ),
}
_GEMINI = {
    "parts": (_BLOCKS, lambda n: {"contents": [{"parts": [{"text": "a"}] * n}]}),
    "calls and responses by id": (_BLOCKS // 2, lambda n: _calls(n, named=True)),
    "calls and responses by name": (_BLOCKS // 2, lambda n: _calls(n, named=False)),
    "functions": (BOUNDS.max_tools, _declared),
}
_BATCHES = {"rows": (4096, lambda n: [{**_talk(1), "max_tokens": 1}] * n)}
_ADVICE: dict[str, tuple[int, Callable[[int], Any]]] = {
    "messages": (_BLOCKS, lambda n: [_talk(n)]),
    "requests": (pasted.MAX_REQUESTS, lambda n: [_talk(2000)] * n),
    "bytes of a command": (
        _CHARACTERS // 2,
        lambda n: ["curl -d '{\"messages\": []}' " + "'a'\"b\"\\c" * (n // 8)],
    ),
}


def _part(kind: str) -> Json:
    return {"type": kind, "text": "a"}


DIALECT_DIMENSIONS: list[Dimension] = [
    *dimensions("responses", _responses, _RESPONSES),
    *dimensions("gemini", _gemini, _GEMINI),
    *dimensions("batch", _batch, _BATCHES),
    *dimensions("advice", _advice, _ADVICE),
]
