"""An engine that speaks the protocol over real HTTP and answers from a script.

It counts one token per four characters and remembers marked prefixes by scope, so that a second
request reads what the first one wrote. It is not an engine: no pool, no leases, no model.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from engine import protocol
from engine.protocol import reports
from scripts.stack import ENGINE_SECRET

Script = Callable[
    [protocol.GenerateRequest, protocol.InputUsage], list[protocol.Frame | float | bytes]
]
TAIL_TOKENS = 4


def say(*texts: str, delay: float = 0.0) -> Script:
    """A script: one delta for each text, with a pause before each."""

    def script(
        request: protocol.GenerateRequest, _: protocol.InputUsage
    ) -> list[protocol.Frame | float | bytes]:
        steps: list[protocol.Frame | float | bytes] = []
        for text in texts:
            steps += [delay, protocol.TextDelta(text)]
        count = len(texts)
        return [
            *steps,
            protocol.Finished(reason="stop", output_tokens=count),
            protocol.Done(request_id=request.request_id, output_tokens=count),
        ]

    return script


@dataclass
class ScriptedEngine:
    secret: str = ENGINE_SECRET
    script: Script = field(default_factory=lambda: say("Hello", " there"))
    wait_seconds: float = 0.0
    num_heartbeats: int = 0
    heartbeat_seconds: float = 0.5
    is_ready: bool = True
    breaks_early: bool = False
    refusal: protocol.ErrorReply | None = None
    refuses: bytes = b""
    """Only bodies with these bytes."""
    epoch: str = "epoch-1"
    model: str = "scripted"
    max_running: int = 0
    longest_token_bytes: int = 0
    count_seconds: float = 0.0
    num_counting: int = 0
    num_counts: int = 0
    is_mute: bool = False
    holds: bool = False
    requests: list[protocol.GenerateRequest] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    final: dict[str, protocol.FinalCounts] = field(default_factory=dict)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    capabilities: tuple[str, ...] = tuple(
        capability for capability in get_args(protocol.Capability) if capability != "images"
    )
    entries: set[tuple[str, int, str]] = field(default_factory=set)
    unheld: list[protocol.UnheldTool] = field(default_factory=list)
    folded: list[int] = field(default_factory=list)
    inexact: list[int] = field(default_factory=list)
    upstream: str | None = None
    guarantees: list[reports.Guarantee] = field(default_factory=list)
    backend: Literal["synthetic", "vllm"] = "synthetic"
    is_mounted: bool = True
    records: dict[str, str] = field(default_factory=dict)
    context: int = 100_000
    identity: reports.ModelIdentity = field(default_factory=reports.ModelIdentity)
    adapters: list[reports.AdapterInfo] = field(default_factory=list)
    ttls: tuple[str, ...] = tuple(protocol.TTLS)

    def restart(self, **changes: Any) -> None:
        """Be another process from now on, with these changes."""
        self.epoch = f"{self.epoch}+"
        for name, value in changes.items():
            setattr(self, name, value)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await _read(receive)
        path = scope["path"]
        headers = dict(scope["headers"])
        if not self.is_mounted:
            return await _reply(send, {"detail": "Not Found"}, 404)
        if path == "/readyz":
            status = 200 if self.is_ready else 503
            return await _reply(send, {"ready": self.is_ready, "progress": 0.5}, status)
        if headers.get(b"authorization") != f"Bearer {self.secret}".encode():
            return await _reply(send, protocol.ErrorReply("unauthorized", "no"), 401)
        meant = headers.get(b"x-epoch", self.epoch.encode()).decode()
        if path == "/v1/generate" and meant != self.epoch:
            return await _reply(send, protocol.ErrorReply("not_ready", "another epoch"), 503)
        handler: Callable[..., Awaitable[None]] | None = {
            "/v1/describe": self._describe,
            "/v1/generate": self._generate,
            "/v1/count": self._count,
            "/v1/cancel": self._cancel,
            "/v1/ack": self._ack,
            "/v1/unacknowledged": self._unacknowledged,
            "/v1/records": self._records,
            "/v1/stats": self._stats,
            "/v1/entries": self._entries,
        }.get(path)
        if handler is None:
            return await _reply(send, protocol.ErrorReply("not_found", "no"), 404)
        await handler(body, receive, send)

    async def _describe(self, _: bytes, receive: Any, send: Any) -> None:
        await _reply(
            send,
            reports.Description(
                backend=self.backend,
                model=self.model,
                epoch=self.epoch,
                max_context_tokens=self.context,
                block_size=16,
                num_blocks=64,
                granularity=1,
                min_cache_tokens=16,
                capabilities=list(self.capabilities),
                max_running=self.max_running,
                longest_token_bytes=self.longest_token_bytes,
                upstream=self.upstream,
                guarantees=self.guarantees,
                keeps_records=True,
                adapters=self.adapters,
                identity=self.identity,
                ttls=self.ttls,
            ),
        )

    async def _generate(self, body: bytes, receive: Any, send: Any) -> None:
        request = msgspec.json.decode(body, type=protocol.GenerateRequest)
        if self.refusal is not None and self.refuses in body:
            self.refused.append(request.request_id)
            return await _reply(send, self.refusal, protocol.STATUS_OF[self.refusal.code])
        self.requests.append(request)
        self.records[request.request_id] = request.record
        stop = self.running[request.request_id] = asyncio.Event()
        watcher = asyncio.ensure_future(_watch(receive, stop))
        usage, reports = self._look_up(request)
        sent = 0
        has_started = False
        try:
            await self._begin(send, stop)
            started = protocol.Started(
                request_id=request.request_id,
                epoch=self.epoch,
                usage=usage,
                breakpoints=reports,
                receipt=protocol.Receipt(name_tokens=[0] * len(request.names), num_held=0),
                miss_reason=None if usage.cache_read_tokens else "cold",
                unheld=self.unheld,
                folded=self.folded,
                inexact=self.inexact,
            )
            has_started = not stop.is_set()
            for step in [started, *self.script(request, usage)]:
                if isinstance(step, float):
                    await _pause(step, stop)
                    continue
                if stop.is_set():
                    break
                sent += isinstance(step, protocol.TextDelta)
                data = step if isinstance(step, bytes) else msgspec.json.encode(step) + b"\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if data == b"":
                    raise ConnectionResetError
            await send({"type": "http.response.body", "body": b""})
        finally:
            watcher.cancel()
            del self.running[request.request_id]
            self.final[request.request_id] = protocol.FinalCounts(
                request_id=request.request_id,
                epoch=self.epoch,
                reason="cancelled" if stop.is_set() else "stop",
                **self._counts(usage, sent, has_started),
            )

    async def _begin(self, send: Any, stop: asyncio.Event) -> None:
        """The head and the heartbeats before the first frame."""
        if self.is_mute:
            await stop.wait()
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        for _ in range(self.num_heartbeats):
            await _pause(self.heartbeat_seconds, stop)
            await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        await _pause(self.wait_seconds, stop)
        while self.holds and not stop.is_set():
            await _pause(0.1, stop)
            await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        if self.breaks_early:
            raise ConnectionResetError

    @staticmethod
    def _counts(usage: protocol.InputUsage, sent: int, has_started: bool) -> dict[str, Any]:
        if has_started:
            return {"usage": usage, "output_tokens": sent}
        return {"prefilled_tokens": usage.computed_tokens}

    def _look_up(
        self, request: protocol.GenerateRequest
    ) -> tuple[protocol.InputUsage, list[protocol.BreakpointReport]]:
        ends = segment_tokens(request.prompt)
        total = (ends[-1] if ends else 0) + TAIL_TOKENS
        digests = {name.segment: name.digest for name in request.names if name.characters is None}
        marked = [(b, ends[b.segment], digests[b.segment]) for b in request.breakpoints]
        keys = [(request.scope, tokens, digest) for _, tokens, digest in marked]
        read_tokens = max((key[1] for key in keys if key in self.entries), default=0)
        writes = protocol.split_writes(((tokens, b.ttl) for b, tokens, _ in marked), read_tokens)
        self.entries.update(keys)
        usage = protocol.InputUsage(
            input_tokens=total - read_tokens - sum(writes.values()),
            cache_read_tokens=read_tokens,
            computed_tokens=total - read_tokens,
            **{protocol.WRITE_FIELDS[ttl]: tokens for ttl, tokens in writes.items()},
        )
        reports = [
            protocol.BreakpointReport(
                segment=b.segment,
                state="leased",
                tokens=tokens,
                ttl=b.ttl,
                expires_in_seconds=300.0,
                missed=None if tokens <= read_tokens else "grew" if read_tokens else "cold",
            )
            for b, tokens, _ in marked
        ]
        return usage, reports

    async def _count(self, body: bytes, receive: Any, send: Any) -> None:
        request = msgspec.json.decode(body, type=protocol.CountRequest)
        ends = segment_tokens(request.prompt)
        self.num_counts += 1
        self.num_counting += 1
        stop = asyncio.Event()
        watcher = asyncio.ensure_future(_watch(receive, stop))
        await _pause(self.count_seconds, stop)
        watcher.cancel()
        self.num_counting -= 1
        await _reply(send, protocol.CountReply(ends[-1] + TAIL_TOKENS, list(ends)))

    async def _cancel(self, body: bytes, receive: Any, send: Any) -> None:
        request_id = msgspec.json.decode(body, type=protocol.CancelRequest).request_id
        self.cancelled.append(request_id)
        is_running = request_id in self.running
        if is_running:
            self.running[request_id].set()
        await _reply(send, {"cancelled": is_running})

    async def _ack(self, body: bytes, receive: Any, send: Any) -> None:
        for request_id in msgspec.json.decode(body, type=protocol.AckRequest).request_ids:
            self.acked.append(request_id)
            self.final.pop(request_id, None)
            self.records.pop(request_id, None)
        await _reply(send, None, 204)

    async def _unacknowledged(self, _: bytes, receive: Any, send: Any) -> None:
        await _reply(send, list(self.final.values()))

    async def _records(self, body: bytes, receive: Any, send: Any) -> None:
        request_ids = msgspec.json.decode(body, type=protocol.AckRequest).request_ids
        kept_records = [
            protocol.KeptRecord(i, self.records[i]) for i in request_ids if self.records.get(i)
        ]
        await _reply(send, kept_records)

    async def _stats(self, _: bytes, receive: Any, send: Any) -> None:
        blocks = reports.BlockStats(total=64, free=64, active=0, leased=0, best_effort=0, cached=0)
        await _reply(
            send,
            reports.Stats(
                epoch=self.epoch,
                uptime_seconds=1.0,
                running=len(self.running),
                waiting=0,
                blocks=blocks,
                counters=reports.Counters(),
            ),
        )

    async def _entries(self, _: bytes, receive: Any, send: Any) -> None:
        await _reply(send, [])


def segment_tokens(prompt: protocol.Prompt) -> list[int]:
    if prompt.text is not None:
        return [len(prompt.text) // 4 + 1]
    texts = [t.name + str(t.input_schema) for t in prompt.tools] + [b.text for b in prompt.system]
    for message in prompt.messages:
        texts += [p.name if isinstance(p, protocol.ToolUsePart) else p.text for p in message.parts]
    ends = []
    total = 0
    for text in texts:
        total += len(text) // 4 + 1
        ends.append(total)
    return ends


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


async def _watch(receive: Any, stop: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stop.set()


async def _read(receive: Any) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _reply(send: Any, value: Any, status: int = 200) -> None:
    body = b"" if status == 204 else msgspec.json.encode(value)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})
