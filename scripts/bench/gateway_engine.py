"""A stub of an engine for `scripts.bench.gateway`: fixed replies, at once, over real HTTP.

    python -m scripts.bench.gateway_engine PORT

It is no engine: it has no pool, no leases, no model and no tokens. It answers the calls of the
engine protocol that a gateway makes, and those of OpenAI's API that other gateways make. The bytes
of its answers were made before:

- one delta of 1 KB, in the same write as everything else;
- with `max_tokens` 200, 200 deltas of one word, each written by itself, 2 ms after the one before.

It says that the marked part of every prompt was read from memory. It holds every name that it
receives. As an engine does, it publishes one event for each generation.
"""

import asyncio
import sys
from typing import Any

import httptools
import msgspec
import uvloop

from engine import protocol
from engine.protocol import reports

MODEL = "holdfast-demo"
NUM_DELTAS = 200
PROMPT_TOKENS = 2000
_ANSWER = "A fixed answer. " * 64
_TICK_SECONDS = 0.002
_TICKS_OF_HEARTBEAT = 1000
_EPOCH = "fixed"

_encode = msgspec.json.encode


class EngineRequest(msgspec.Struct):
    """What the stub reads of a `GenerateRequest`. The prompt is skipped."""

    request_id: str
    sampling: protocol.Sampling
    breakpoints: list[protocol.Breakpoint] = []
    names: list[protocol.Name] = []


class OpenAIRequest(msgspec.Struct):
    """What the stub reads of an OpenAI request."""

    stream: bool = False


_decode_engine = msgspec.json.Decoder(EngineRequest).decode
_decode_openai = msgspec.json.Decoder(OpenAIRequest).decode


class Ticker:
    """Streams that get one piece each tick, and the connections that follow events."""

    def __init__(self) -> None:
        self.streams: list[tuple[asyncio.Transport, list[bytes]]] = []
        self.followers: list[asyncio.Transport] = []
        self.seq = 0

    def publish(self, names: list[protocol.Name]) -> None:
        if names:
            self.seq += 1
            held_names = [
                protocol.HeldName(name.digest, 16 * (i + 1)) for i, name in enumerate(names)
            ]
            self._tell(protocol.ChainHeld(seq=self.seq, names=held_names))

    async def run(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            tick += 1
            if tick % _TICKS_OF_HEARTBEAT == 0:
                self._tell(protocol.Heartbeat(seq=self.seq))
            for transport, pieces in self.streams:
                transport.write(pieces.pop())
            self.streams = [stream for stream in self.streams if stream[1]]

    def _tell(self, event: msgspec.Struct) -> None:
        self.followers = [pipe for pipe in self.followers if not pipe.is_closing()]
        for follower in self.followers:
            follower.write(chunk(_encode(event) + b"\n"))


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; requests one after another."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.decode().partition("?")[0]
        body = b"".join(self._body)
        if path == "/v1/generate":
            self._generate(_decode_engine(body))
        elif path == "/v1/chat/completions":
            if _decode_openai(body).stream:
                self._stream(_SSE_HEAD, list(_WORD_DELTAS))
            else:
                self._transport.write(_COMPLETION)
        elif path == "/v1/events":
            snapshot = protocol.Snapshot(seq=self._ticker.seq, epoch=_EPOCH, chains=[])
            self._transport.write(_STREAM_HEAD + chunk(_encode(snapshot) + b"\n"))
            self._ticker.followers.append(self._transport)
        else:
            self._transport.write(_FIXED.get(path, _reply({})))

    def _generate(self, request: EngineRequest) -> None:
        is_slow = request.sampling.max_tokens == NUM_DELTAS
        last_frame = protocol.Done(request_id=request.request_id, output_tokens=NUM_DELTAS)
        pieces = [_frame(_started(request)), *(_WORD_FRAMES if is_slow else [_ANSWER_FRAME])]
        pieces += [_FINISHED, _frame(last_frame)]
        if is_slow:
            self._stream(_STREAM_HEAD, pieces)
        else:
            self._transport.write(_STREAM_HEAD + b"".join(pieces) + _END)
        self._ticker.publish(request.names)

    def _stream(self, head: bytes, pieces: list[bytes]) -> None:
        pieces[-1] += _END
        self._transport.write(head)
        self._ticker.streams.append((self._transport, pieces[::-1]))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _frame(frame: msgspec.Struct) -> bytes:
    return chunk(_encode(frame) + b"\n")


def _reply(answer: object) -> bytes:
    body = _encode(answer)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _head(media: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % media


def _started(request: EngineRequest) -> protocol.Started:
    num_names = len(request.names)
    reports = [
        protocol.BreakpointReport(
            segment=point.segment,
            state="leased",
            tokens=PROMPT_TOKENS,
            ttl=point.ttl,
            expires_in_seconds=300.0,
            missed=None,
        )
        for point in request.breakpoints
    ]
    read_tokens = PROMPT_TOKENS if reports else 0
    return protocol.Started(
        request_id=request.request_id,
        epoch=_EPOCH,
        usage=protocol.InputUsage(
            input_tokens=PROMPT_TOKENS + 16 - read_tokens,
            cache_read_tokens=read_tokens,
            computed_tokens=16,
        ),
        breakpoints=reports,
        receipt=protocol.Receipt(
            name_tokens=[16 * (i + 1) for i in range(num_names)],
            num_held=num_names,
            num_leased=num_names if reports else 0,
            lease_seconds=300.0,
        ),
    )


def _openai(kind: str, **choice: object) -> dict[str, Any]:
    fixed = {"id": "chatcmpl-fixed", "object": kind, "created": 1, "model": MODEL}
    return {**fixed, "choices": [{"index": 0, **choice}]}


def _delta(delta: dict[str, str], reason: str | None = None) -> bytes:
    answer = _openai("chat.completion.chunk", delta=delta, finish_reason=reason)
    return chunk(b"data: %s\n\n" % _encode(answer))


_STREAM_HEAD = _head(b"application/x-ndjson")
_SSE_HEAD = _head(b"text/event-stream")
_END = b"0\r\n\r\n"
# All words differ, because LiteLLM ends a stream that repeats itself.
_WORDS = [f"word {number} " for number in range(NUM_DELTAS)]
_WORD_FRAMES = [_frame(protocol.TextDelta(word)) for word in _WORDS]
_ANSWER_FRAME = _frame(protocol.TextDelta(_ANSWER))
_FINISHED = _frame(protocol.Finished(reason="stop", output_tokens=NUM_DELTAS))
_WORD_DELTAS = [_delta({"content": word}) for word in _WORDS]
_WORD_DELTAS += [_delta({}, "stop"), chunk(b"data: [DONE]\n\n")]
_MESSAGE = {"role": "assistant", "content": _ANSWER}
_COMPLETION = _reply(
    _openai("chat.completion", message=_MESSAGE, finish_reason="stop")
    | {"usage": {"prompt_tokens": 2016, "completion_tokens": 200, "total_tokens": 2216}}
)
_DESCRIPTION = reports.Description(
    backend="synthetic",
    model=MODEL,
    epoch=_EPOCH,
    max_context_tokens=1_000_000,
    block_size=16,
    num_blocks=1 << 20,
    granularity=1,
    min_cache_tokens=16,
    capabilities=["copy_on_write", "tools"],
    keeps_records=True,
)
_STATS = reports.Stats(
    epoch=_EPOCH,
    uptime_seconds=1,
    running=0,
    waiting=0,
    blocks=reports.BlockStats(total=64, free=64, active=0, leased=0, best_effort=0, cached=0),
    counters=reports.Counters(),
)
_FIXED = {
    "/readyz": _reply({"ready": True}),
    "/v1/describe": _reply(_DESCRIPTION),
    "/v1/stats": _reply(_STATS),
    "/v1/unacknowledged": _reply([]),
    "/v1/cancel": _reply({"cancelled": False}),
    "/v1/ack": b"HTTP/1.1 204 No Content\r\n\r\n",
    "/v1/models": _reply({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
}


async def main() -> None:
    ticker = Ticker()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(ticker), "127.0.0.1", int(sys.argv[1])
    )
    async with server:
        await ticker.run()


if __name__ == "__main__":
    uvloop.run(main())
