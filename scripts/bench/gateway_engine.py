"""A stub of an engine for `scripts.bench.gateway`: fixed replies, at once, over real HTTP.

    python -m scripts.bench.gateway_engine PORT

It is no engine: no pool, no leases, no model, no tokens. It speaks as much of the engine protocol
as a gateway calls, and of OpenAI's API as other gateways call, from bytes that were made before:

- one delta of 1 KB, in the same write as everything else;
- with `max_tokens` 200, 200 deltas of one word, each written by itself, 2 ms after the one before;
  20 ms where the request has a `seed` or `top_k` 1.

It says of every prompt that its marked part was read from memory, holds every name that it is told,
and publishes one event for each generation, as an engine does.
"""

import asyncio
import sys
from typing import Any

import httptools
import msgspec
import uvloop

from engine import protocol

MODEL = "holdfast-demo"
NUM_DELTAS = 200
PROMPT_TOKENS = 2000
_ANSWER = "A fixed answer. " * 64
_TICK_SECONDS = 0.002
_TICKS_WHEN_PACED = 10
_HEARTBEAT_SECONDS = 2.0
_EPOCH = "fixed"

_encode = msgspec.json.encode


class Asked(msgspec.Struct):
    """What the stub reads of a `GenerateRequest`; the prompt is skipped over."""

    request_id: str
    sampling: protocol.Sampling
    breakpoints: list[protocol.Breakpoint] = []
    names: list[protocol.Name] = []


class AskedByPeer(msgspec.Struct):
    """The same of an OpenAI request."""

    stream: bool = False
    seed: int | None = None


_asked = msgspec.json.Decoder(Asked).decode
_asked_by_peer = msgspec.json.Decoder(AskedByPeer).decode


class Ticker:
    """Streams that get one piece each tick, and the connections that follow events."""

    def __init__(self) -> None:
        self.streams: list[tuple[asyncio.Transport, list[bytes], int]] = []
        self.followers: list[asyncio.Transport] = []
        self.seq = 0
        self._num_ticks = 0

    def start(self, transport: asyncio.Transport, pieces: list[bytes], every: int) -> None:
        """Write the pieces, one every so many ticks."""
        self.streams.append((transport, pieces[::-1], every))

    def publish(self, names: list[protocol.Name]) -> None:
        if not names:
            return
        self.seq += 1
        held = [protocol.HeldName(name.digest, 16 * (i + 1)) for i, name in enumerate(names)]
        self._tell(protocol.ChainHeld(seq=self.seq, names=held))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._num_ticks += 1
            if self._num_ticks % int(_HEARTBEAT_SECONDS / _TICK_SECONDS) == 0:
                self._tell(protocol.Heartbeat(seq=self.seq))
            for index, (transport, pieces, every) in enumerate(self.streams):
                # Streams of one pace don't all write in the same tick.
                if (self._num_ticks + index) % every == 0:
                    transport.write(pieces.pop())
            self.streams = [stream for stream in self.streams if stream[1]]

    def _tell(self, event: msgspec.Struct) -> None:
        self.followers = [each for each in self.followers if not each.is_closing()]
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
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, body = self._url.decode().partition("?")[0], b"".join(self._body)
        if path == "/v1/generate":
            self._generate(_asked(body))
        elif path == "/v1/chat/completions":
            self._complete(_asked_by_peer(body))
        elif path == "/v1/events":
            self._transport.write(_STREAM_HEAD + chunk(_encode(_snapshot(self._ticker)) + b"\n"))
            self._ticker.followers.append(self._transport)
        else:
            self._transport.write(_FIXED.get(path, _reply(b"{}")))

    def _generate(self, asked: Asked) -> None:
        pieces = [_encode(_started(asked))]
        if asked.sampling.max_tokens == NUM_DELTAS:
            pieces += _WORD_FRAMES
        else:
            pieces.append(_encode(protocol.TextDelta(_ANSWER)))
        pieces.append(_encode(protocol.Finished(reason="stop", output_tokens=NUM_DELTAS)))
        pieces.append(_encode(protocol.Done(request_id=asked.request_id, output_tokens=NUM_DELTAS)))
        self._send(
            _STREAM_HEAD,
            [chunk(piece + b"\n") for piece in pieces],
            is_slow=asked.sampling.max_tokens == NUM_DELTAS,
            is_paced=asked.sampling.seed is not None or asked.sampling.top_k == 1,
        )
        self._ticker.publish(asked.names)

    def _complete(self, asked: AskedByPeer) -> None:
        if not asked.stream:
            self._transport.write(_reply(_encode(_completion())))
            return
        pieces = [chunk(b"data: %s\n\n" % delta) for delta in _WORD_DELTAS]
        pieces.append(chunk(b"data: %s\n\n" % _encode(_delta(None))))
        pieces.append(chunk(b"data: [DONE]\n\n"))
        self._send(_SSE_HEAD, pieces, is_slow=True, is_paced=asked.seed is not None)

    def _send(self, head: bytes, pieces: list[bytes], *, is_slow: bool, is_paced: bool) -> None:
        if not is_slow:
            self._transport.write(head + b"".join(pieces) + _END)
            return
        pieces[-1] += _END
        self._transport.write(head)
        self._ticker.start(self._transport, pieces, _TICKS_WHEN_PACED if is_paced else 1)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _reply(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _head(media: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % media


_STREAM_HEAD = _head(b"application/x-ndjson")
_SSE_HEAD = _head(b"text/event-stream")
_END = b"0\r\n\r\n"


def _started(asked: Asked) -> protocol.Started:
    num_names = len(asked.names)
    reports = [
        protocol.BreakpointReport(
            segment=point.segment,
            state="leased",
            tokens=PROMPT_TOKENS,
            ttl=point.ttl,
            expires_in_seconds=300.0,
        )
        for point in asked.breakpoints
    ]
    read = PROMPT_TOKENS if reports else 0
    return protocol.Started(
        request_id=asked.request_id,
        epoch=_EPOCH,
        usage=protocol.InputUsage(
            input_tokens=PROMPT_TOKENS + 16 - read, cache_read_tokens=read, computed_tokens=16
        ),
        breakpoints=reports,
        receipt=protocol.Receipt(
            name_tokens=[16 * (i + 1) for i in range(num_names)],
            num_held=num_names,
            num_leased=num_names if reports else 0,
            lease_seconds=300.0,
        ),
    )


def _snapshot(ticker: Ticker) -> protocol.Snapshot:
    return protocol.Snapshot(seq=ticker.seq, epoch=_EPOCH, chains=[])


def _openai(kind: str, **choice: object) -> dict[str, Any]:
    fixed = {"id": "chatcmpl-fixed", "object": kind, "created": 1, "model": MODEL}
    return {**fixed, "choices": [{"index": 0, **choice}]}


def _completion() -> dict[str, Any]:
    message = {"role": "assistant", "content": _ANSWER}
    usage = {"prompt_tokens": 2016, "completion_tokens": 200, "total_tokens": 2216}
    answer = _openai("chat.completion", message=message, finish_reason="stop")
    return {**answer, "usage": usage}


def _delta(text: str | None) -> dict[str, Any]:
    delta = {"content": text} if text else {}
    return _openai("chat.completion.chunk", delta=delta, finish_reason=None if text else "stop")


def _description() -> protocol.Description:
    return protocol.Description(
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


def _stats() -> protocol.Stats:
    blocks = protocol.BlockStats(total=64, free=64, active=0, leased=0, best_effort=0, cached=0)
    return protocol.Stats(
        epoch=_EPOCH,
        uptime_seconds=1,
        running=0,
        waiting=0,
        blocks=blocks,
        counters=protocol.Counters(),
    )


# No two alike: LiteLLM ends a stream that repeats itself.
_WORDS = [f"word {number} " for number in range(NUM_DELTAS)]
_WORD_FRAMES = [_encode(protocol.TextDelta(word)) for word in _WORDS]
_WORD_DELTAS = [_encode(_delta(word)) for word in _WORDS]
_FIXED = {
    "/readyz": _reply(b'{"ready": true}'),
    "/v1/describe": _reply(_encode(_description())),
    "/v1/stats": _reply(_encode(_stats())),
    "/v1/unacknowledged": _reply(b"[]"),
    "/v1/cancel": _reply(b'{"cancelled": false}'),
    "/v1/ack": b"HTTP/1.1 204 No Content\r\n\r\n",
    "/v1/models": _reply(_encode({"object": "list", "data": [{"id": MODEL, "object": "model"}]})),
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
