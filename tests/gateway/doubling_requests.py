"""The dimensions of requests and answers, of batches and of advice that are doubled, each up to its
bound."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.protocol import (
    BreakpointReport,
    Done,
    Finished,
    Frame,
    InputUsage,
    Receipt,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolUseStart,
)
from gateway.advice import pasted
from gateway.advice.pasted import advise_request
from gateway.advice.stream import advise_stream
from gateway.base.bounds import DEFAULT_BOUNDS as BOUNDS
from gateway.base.bounds import Tuning
from gateway.base.catalogue import CatalogueModel
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.dialects import sse
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import ask_of
from gateway.dialects.anthropic.response import MessageWriter
from gateway.dialects.collector import Findings
from gateway.dialects.gemini import lower as gemini
from gateway.dialects.gemini.request import decode_generate
from gateway.dialects.lowering import RequestContext
from gateway.dialects.openai.lower import chat_ask_of, completion_ask_of
from gateway.dialects.openai.request import decode_chat, decode_completion
from gateway.dialects.openai.response import ChatWriter
from gateway.dialects.responses.lower import prepare
from gateway.dialects.responses.request import decode_responses
from gateway.dialects.responses.response import echo_of
from gateway.http.batch_runner import ranked
from gateway.prompt.ask import Ask, Compared, Principal
from gateway.prompt.fingerprint import compare, pack, unpack
from tests.doubling import Dimension, Work

Json = dict[str, Any]

PRINCIPAL = Principal("workspace", "key", "5" * 32)
MODEL = CatalogueModel(id="m", display_name="m")
ASKED = RequestContext(PRINCIPAL, MODEL, 0.0, removes_nonces=True)
_COMPARED = Compared(is_wanted=True, previous="msg_1", parameters=b"p")
_BLOCKS = BOUNDS.max_blocks - 16
_BYTES = 8 << 20
"""A quarter of the longest body: enough to see how it grows."""
_BLANK_BYTES = 4 << 20
"""So little is done with a blank byte that the end of a processor's cache shows: a byte costs half
as much again where body and text are longer than that together, and no more behind it."""
_HI = {"role": "user", "content": "hi"}
_MARKER = {"type": "ephemeral"}


def read_by(decode: Callable[[bytes], Ask], body: Json) -> Work:
    """What the gateway does with every request besides sending it."""
    raw = msgspec.json.encode({"model": "m", **body})

    def work() -> None:
        with suppress(GatewayError):
            ask = decode(raw)
            fingerprint = ask.fingerprint(100)
            compare(unpack(pack(fingerprint)), fingerprint)
            msgspec.json.encode(ask.generate_request("r", 1.0, ()))

    return work


def reading(decode: Callable[[bytes], Ask], **usual: Any) -> Callable[[Json], Work]:
    """`usual` is what a body has besides what is doubled."""
    return lambda body: read_by(decode, {**usual, **body})


def _raw(how: tuple[Callable[[bytes], object], bytes]) -> Work:
    decode, body = how

    def work() -> None:
        with suppress(GatewayError):
            decode(body)

    return work


def _text(value: str = "a", **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def _content(blocks: list[Any]) -> Json:
    return {"messages": [{"role": "user", "content": blocks}]}


def _alternating(count: int) -> Json:
    roles = ["user", "assistant"] * (count // 2) + ["user"]
    return {"messages": [{"role": role, "content": "a"} for role in roles[-count:]]}


def _tools(count: int) -> list[Json]:
    return [{"name": f"t{n}", "description": "a", "input_schema": _schema(8)} for n in range(count)]


def _functions(count: int) -> list[Json]:
    named = [{"name": f"t{n}", "parameters": _schema(8)} for n in range(count)]
    return [{"type": "function", "function": function} for function in named]


def _schema(count: int) -> Json:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


def _deep(count: int) -> Json:
    """As many properties, in levels of 30 of them each."""
    schema: Json = _schema(1)
    for _ in range(30):
        schema = {
            "type": "object",
            "properties": {"inner": schema, **_schema(count // 30)["properties"]},
        }
    return schema


def _exchange(calls: list[Json], results: Any) -> Json:
    answer = {"role": "assistant", "content": calls}
    reply = {"role": "user", "content": results}
    return {"messages": [_HI, answer, reply]}


def _calls(count: int, *, answered: int | None = None) -> Json:
    """As many calls in one message, answered in the next."""
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "t", "input": {}} for n in range(count)]
    results = [
        {"type": "tool_result", "tool_use_id": f"c{n}", "content": "a"}
        for n in reversed(range(count if answered is None else answered))
    ]
    return _exchange(calls, results or "a")


def _chat_calls(count: int, arguments: str = '{"a": 1}') -> Json:
    function = {"name": "t", "arguments": arguments}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(count)]
    results = [
        {"role": "tool", "tool_call_id": f"c{n}", "content": "a"} for n in reversed(range(count))
    ]
    return {"messages": [_HI, {"role": "assistant", "tool_calls": calls}, *results, _HI]}


def _nested(count: int, inner: Json) -> Json:
    call = {"type": "tool_use", "id": "c", "name": "t", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [inner] * count}
    return _exchange([call], [result])


def _document(count: int) -> Json:
    return {"type": "document", "source": {"type": "content", "content": [_text()] * count}}


def _thinking(count: int) -> Json:
    block = {"type": "thinking", "thinking": "a", "signature": "s"}
    return {"messages": [_HI, {"role": "assistant", "content": [block] * count}, _HI]}


def _input(count: int) -> Json:
    request = _nested(1, _text())
    request["messages"][1]["content"][0]["input"] = {"a": list(range(count))}
    return request


def _edits(count: int) -> Json:
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    return {"context_management": {"edits": [edit] * 16}, **_thinking(count)}


def _form(count: int) -> Json:
    schema = {"name": "n", "schema": _schema(count)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _line(count: int) -> list[Json]:
    line = "x-anthropic-billing-header: cc_version=2.1.0; cch=36ee5;"
    return [_text(line)] + [_text(line + "\nrest")] * count


_USAGE = InputUsage(input_tokens=1, computed_tokens=1)


def _answer(*deltas: Frame) -> list[Frame]:
    report = BreakpointReport(segment=0, state="none")
    receipt = Receipt(name_tokens=[], num_held=0)
    started = Started(
        request_id="r", epoch="e", usage=_USAGE, breakpoints=[report], receipt=receipt
    )
    finished = Finished(reason="stop", output_tokens=1)
    return [started, *deltas, finished, Done(request_id="r", output_tokens=1)]


def _messages_writer() -> MessageWriter:
    return MessageWriter(id="t", model="m", findings=Findings("e"), paths=["messages.0"])


def _chat_writer() -> ChatWriter:
    paths = ["messages[0]"]
    options = {"num_choices": 1, "include_usage": True}
    return ChatWriter(id="r", model="m", created=0, findings=Findings("e"), paths=paths, **options)


def writing(make: Callable[[], Any], encode: Callable[[Any], object]) -> Callable[[Any], Work]:
    """Of an answer of these deltas: each event, and the whole answer."""

    def of(deltas: list[Frame]) -> Work:
        frames = _answer(*deltas)

        def work() -> None:
            writer = make()
            for frame in frames:
                for event in writer.write(frame):
                    encode(event)
                writer.take(frame)
            writer.whole()

        return work

    return of


def _call_frames(count: int) -> list[Frame]:
    return [
        frame for n in range(count) for frame in (ToolUseStart(f"c{n}", "t"), ToolInputDelta("{}"))
    ]


def dimensions(
    group: str, work: Callable[[Any], Work], rows: Mapping[str, tuple[int, Callable[[int], Any]]]
) -> list[Dimension]:
    """From each dimension's bound and what `work` gets at a size."""
    return [
        Dimension(
            f"{group}: {name}",
            most,
            lambda size, make=make: work(make(size)),  # type: ignore[misc]
            is_bytes="bytes" in name,
        )
        for name, (most, make) in rows.items()
    ]


_MESSAGES = {
    "blocks of one message": (_BLOCKS, lambda n: _content([_text()] * n)),
    "messages": (_BLOCKS, _alternating),
    "bytes of one text": (_BYTES, lambda n: _content([_text("a b " * (n // 4))])),
    "bytes that are escaped": (_BYTES // 4, lambda n: _content([_text('",' * (n // 2))])),
    "system blocks with nonces": (_BLOCKS, lambda n: {"system": _line(n)}),
    "tools": (BOUNDS.max_tools, lambda n: {"tools": _tools(n)}),
    "properties": (
        BOUNDS.max_schema_properties,
        lambda n: {"tools": [{**_tools(1)[0], "input_schema": _schema(n)}]},
    ),
    "tool calls and results": (_BLOCKS // 2, _calls),
    "values of a tool's input": (BOUNDS.max_json_values // 2, _input),
    "blocks of a tool result": (_BLOCKS, lambda n: _nested(n, _text())),
    "documents in a tool result": (_BLOCKS // 5, lambda n: _nested(n, _document(4))),
    "thinking blocks and edits": (_BLOCKS, _edits),
    "stop sequences": (BOUNDS.max_stop_sequences, lambda n: {"stop_sequences": ["x" * 1024] * n}),
    "names (bytes of many texts)": (
        _BYTES,
        lambda n: _content([_text("a" * 8300)] * (n // 8300)),
    ),
    "markers": (_BLOCKS // 2, lambda n: _content([_text(cache_control=_MARKER)] * n)),
    "the last block is wrong": (_BLOCKS, lambda n: _content([_text()] * n + [{"type": "image"}])),
    "calls without results": (_BLOCKS, lambda n: _calls(n, answered=0)),
    "bytes of an unknown field": (_BYTES // 4, lambda n: {" - at `$" * (n // 8): 1}),
    "bytes of a wrong value": (_BYTES // 4, lambda n: {"service_tier": " - at `$[" * (n // 9)}),
    "unknown fields": (BOUNDS.max_json_values // 4, lambda n: {f"f{i}": 1 for i in range(n)}),
    "properties in levels": (
        BOUNDS.max_schema_properties,
        lambda n: {"tools": [{**_tools(1)[0], "input_schema": _deep(n)}]},
    ),
    "blank bytes": (_BLANK_BYTES, lambda n: _content([_text(" " * n)])),
    "bytes of characters of four bytes": (_BYTES // 4, lambda n: _content([_text("𝔸" * (n // 4))])),
}
_CHAT = {
    "parts of one message": (_BLOCKS, lambda n: _content([_text()] * n)),
    "messages": (_BLOCKS, _alternating),
    "tools": (BOUNDS.max_tools, lambda n: {"tools": _functions(n)}),
    "properties": (BOUNDS.max_schema_properties, _form),
    "tool calls and results": (_BLOCKS // 2, _chat_calls),
    "native breakpoints": (
        _BLOCKS,
        lambda n: _content([_text(prompt_cache_breakpoint={"mode": "explicit"})] * n),
    ),
    "the last part is wrong": (
        _BLOCKS,
        lambda n: _content([_text()] * n + [{"type": "image_url"}]),
    ),
    "choices": (BOUNDS.max_choices, lambda n: {"n": n}),
    "bytes of a call's arguments": (
        _BYTES // 8,
        lambda n: _chat_calls(1, '{"a": "' + "b" * n + '"}'),
    ),
}
_BODIES = {
    "too many values": (
        _BYTES,
        lambda n: (decode_messages, b"[" + b'{"a": "b"},' * (n // 11) + b"1]"),
    ),
    "quotes without an end": (_BYTES, lambda n: (decode_chat, b'["' + b'\\",' * (n // 3))),
    "nested lists": (_BYTES, lambda n: (decode_messages, b"[" * n)),
}
_COMPLETIONS = {"bytes of the prompt": (_BYTES, lambda n: {"prompt": "a b " * (n // 4)})}
_CHUNKS = {
    "texts": (16_384, lambda n: [TextDelta("a")] * n),
    "calls": (8_192, _call_frames),
}
_EVENTS = {**_CHUNKS, "thinking": (16_384, lambda n: [ThinkingDelta("a")] * n)}
_SAID = {"role": "user", "parts": [{"text": "hi"}]}


def _decode_responses(raw: bytes) -> Ask:
    decoded = decode_responses(raw)
    msgspec.json.encode(echo_of(decoded.fields))
    return prepare(decoded, ASKED).ask


def _batch(rows: list[Json]) -> Work:
    services: Any = SimpleNamespace(
        bounds=Tuning(),
        find_model=lambda _: MODEL,
        context_of=lambda user, model, arrived: ASKED,
        auto_cache_messages=False,
        clock=Clock(),
    )
    requests = [{"custom_id": str(n), "params": row} for n, row in enumerate(rows)]
    raw = msgspec.json.encode({"requests": requests})
    return lambda: ranked(services, raw, PRINCIPAL, "2023-06-01")


def _advice(requests: list[Any]) -> Work:
    def work() -> None:
        with suppress(GatewayError):
            turns = []
            for number, request in enumerate(requests):
                parsed = pasted.read(request)
                turns.append(pasted.observation_of(parsed, number, number, None))
                msgspec.json.encode(advise_request(parsed, turns[-1], 1))
            advise_stream(turns, 1)

    return work


def _gemini_calls(count: int, *, named: bool) -> Json:
    """As many calls in one turn, answered in the next in the opposite order."""
    ids = [{"id": f"c{n}"} if named else {} for n in range(count)]
    calls = [{"functionCall": {"name": f"f{n}", **fields}} for n, fields in enumerate(ids)]
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


def _searches(count: int) -> Json:
    """As many searches, each with a tool that it came to."""
    items: list[Json] = []
    for n in range(count):
        ids = {"call_id": f"s{n}" if n % 2 else None, "execution": "client"}
        items.append({"type": "tool_search_call", "arguments": {"a": "b"}, **ids})
        tools = [{"type": "function", "name": f"t{n}", "parameters": {}}]
        items.append({"type": "tool_search_output", "tools": tools, **ids})
    return {"input": [_HI, *items], "tools": [{"type": "tool_search", "execution": "client"}]}


def _hosted(count: int) -> Json:
    call = {"type": "mcp_call", "name": "n", "server_label": "s", "arguments": "{}", "output": "a"}
    return {"input": [_HI, *({**call, "id": f"m{n}"} for n in range(count))]}


def _older(count: int) -> Json:
    """Calls of functions from before there were tools, each answered."""
    talk: list[Json] = []
    for n in range(count):
        talk.append({"role": "assistant", "function_call": {"name": f"f{n}", "arguments": "{}"}})
        talk.append({"role": "function", "name": f"f{n}", "content": "a"})
    return {"messages": [_HI, *talk]}


def _unknown(count: int) -> Json:
    return {"contents": [{"parts": [{"text": "a", "vendor": {"b": 1}}] * count}]}


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
    return {"model": "m", **_alternating(count // 2 * 2 + 1)}


_RESPONSES = {
    "parts": (
        _BLOCKS,
        lambda n: {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * n}]
        },
    ),
    "calls and outputs": (_BLOCKS // 2, _items),
    "allowed tools": (BOUNDS.max_tools, _allowed),
    "searches for tools": (BOUNDS.max_tools // 2, _searches),
    "calls that the vendor ran": (_BLOCKS // 2, _hosted),
    "bytes of a tool of the vendor's": (
        1 << 21,
        lambda n: {"tools": [{"type": "web_search", "more": "a" * n}]},
    ),
}
_GEMINI = {
    "parts": (_BLOCKS, lambda n: {"contents": [{"parts": [{"text": "a"}] * n}]}),
    "calls and responses by id": (_BLOCKS // 2, lambda n: _gemini_calls(n, named=True)),
    "calls and responses by name": (_BLOCKS // 2, lambda n: _gemini_calls(n, named=False)),
    "functions": (BOUNDS.max_tools, _declared),
    "unknown fields": (_BLOCKS, _unknown),
}
_BATCHES = {"rows": (4096, lambda n: [{**_talk(1), "max_tokens": 1}] * n)}
_ADVICE: dict[str, tuple[int, Callable[[int], Any]]] = {
    "messages": (_BLOCKS, lambda n: [_talk(n)]),
    "requests": (pasted.MAX_REQUESTS, lambda n: [_talk(2000)] * n),
    "bytes of a command": (
        pasted.MAX_CHARACTERS // 2,
        lambda n: ["curl -d '{\"messages\": []}' " + "'a'\"b\"\\c" * (n // 8)],
    ),
}


_READ_MESSAGES = reading(
    lambda raw: ask_of(decode_messages(raw), ASKED, "2023-06-01", comparison=_COMPARED),
    max_tokens=1,
    messages=[_HI],
)
_READ_CHAT = reading(lambda raw: chat_ask_of(decode_chat(raw), ASKED), messages=[_HI])
_READ_COMPLETION = reading(lambda raw: completion_ask_of(decode_completion(raw), ASKED))
_READ_GEMINI = reading(
    lambda raw: gemini.ask_of(decode_generate(raw, "m"), ASKED, stream=False), contents=[_SAID]
)
DIMENSIONS = [
    *dimensions("messages", _READ_MESSAGES, _MESSAGES),
    *dimensions("chat", _READ_CHAT, _CHAT),
    *dimensions("chat", _READ_CHAT, {"older calls": (_BLOCKS // 4, _older)}),
    *dimensions("completions", _READ_COMPLETION, _COMPLETIONS),
    *dimensions("body", _raw, _BODIES),
    *dimensions("events", writing(_messages_writer, lambda event: sse.event("e", event)), _EVENTS),
    *dimensions("chunks", writing(_chat_writer, sse.data), _CHUNKS),
    *dimensions("responses", reading(_decode_responses, input=[_HI]), _RESPONSES),
    *dimensions("gemini", _READ_GEMINI, _GEMINI),
    *dimensions("batch", _batch, _BATCHES),
    *dimensions("advice", _advice, _ADVICE),
]
