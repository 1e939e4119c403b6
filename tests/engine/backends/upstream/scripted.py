"""A scripted stand-in for a model server, on a real socket: it computes nothing.

It has the routes of `vllm serve` that the engine uses, a prefix cache by salt and whole blocks, and
says what it is told to say. A `Fault` changes what it does to the next completions.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from engine.settings import DEMO_MODEL

BLOCK_SIZE = 16
CONTEXT = 4096
ANSWER = "One two three four five six seven eight nine ten."


@dataclass
class Fault:
    """`body` replaces a completion's stream; `status` its answer; `pause` is seconds before it.

    `usage` changes what it counts. `after` tokens of a stream it breaks the connection off, or ends
    the answer with `reason`, as a server does that is paused.
    """

    status: int = 200
    body: bytes | None = None
    pause: float = 0.0
    usage: dict[str, Any] | None = None
    after: int | None = None
    reason: str | None = None
    comments: int = 0
    only_streams: bool = False


@dataclass
class Seen:
    path: str
    body: dict[str, Any]


@dataclass
class Script:
    """What the server does. `tells`: it was started with `--enable-prompt-tokens-details`.

    `status` answers every question that is no generation, where it is not 200. `model` is what it
    loaded, whatever name it is asked by.
    """

    tells: bool = True
    heeds_salts: bool = True
    is_down: bool = False
    status: int = 200
    fault: Fault | None = None
    started_at: float = 1.0
    context: int = CONTEXT
    other_tokenizer: bool = False
    model: str = "org/demo"
    token_seconds: float = 0.0
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    seen: list[Seen] = field(default_factory=list)
    open_streams: int = 0
    computed: int = 0

    def completions(self) -> list[dict[str, Any]]:
        return [request.body for request in self.seen if request.path == "/v1/completions"]

    def restart(self) -> None:
        self.started_at += 1
        self.cached.clear()

    def reuse(self, body: dict[str, Any]) -> int:
        """Count a prompt's whole blocks that are in memory, and put all of them there."""
        salt = body.get("cache_salt", "") if self.heeds_salts else ""
        tokens = body["prompt"]
        reused = 0
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        for end in ends:
            if (salt, tuple(tokens[:end])) not in self.cached or end >= len(tokens):
                break
            reused = end
        self.cached |= {(salt, tuple(tokens[:end])) for end in ends}
        self.computed += len(tokens) - reused
        return reused


def takes_salt(salt: str | None) -> bool:
    """The rule of vLLM 0.32 (`validate_cache_salt` in entrypoints/generate/base/protocol.py)."""
    return salt is None or (0 < len(salt) <= 128 and not set("@/\\\0") & set(salt))


class ScriptedVllm:
    generation = "/v1/completions"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.tokenizer = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")
        self.answer = self.tokenizer.encode(ANSWER, add_special_tokens=False).ids

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer_one(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        length = next(
            (int(line.split(":")[1]) for line in head.lower().split("\r\n")
             if line.startswith("content-length")), 0)  # fmt: skip
        body = json.loads(await reader.readexactly(length)) if length else {}
        if self.script.is_down:
            return
        self.script.seen.append(Seen(path, body))
        if path == self.generation:
            await self._complete(body, reader, writer)
            return
        status = self.script.status
        answer = b"{}"
        if status == 200:
            status, answer = self._look(path, body)
        await send(writer, status, answer)

    def _look(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        script = self.script
        if path == "/metrics":
            text = (
                f"process_start_time_seconds {script.started_at}\n"
                f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="512"}} 1.0\n'
            )
            return 200, text.encode()
        answers: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "0.32.0 (scripted)"},
            "/v1/models": {
                "data": [
                    {
                        "id": "demo",
                        "owned_by": "vllm",
                        "max_model_len": script.context,
                        "root": script.model,
                    }
                ]
            },
        }
        if path == "/tokenize":
            tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            return 200, json.dumps({"tokens": tokens[script.other_tokenizer :]}).encode()
        if path not in answers:
            return 404, b"{}"
        return 200, json.dumps(answers[path]).encode()

    async def _complete(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        script = self.script
        fault = self.script.fault or Fault()
        if fault.only_streams and not body["stream"]:
            fault = Fault()
        if fault.pause:
            await asyncio.sleep(fault.pause)
        if body.get("structured_outputs") or fault.status != 200:
            status = fault.status if fault.status != 200 else 400
            await send(writer, status, b'{"error": {"message": "no"}}')
            return
        if not takes_salt(body.get("cache_salt")):
            await send(writer, 400, b'{"error": {"message": "cache_salt"}}')
            return
        reused = script.reuse(body)
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        if script.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": reused}
        usage |= fault.usage or {}
        if not body["stream"]:
            answer = {"choices": [{"token_ids": self.answer[:1]}], "usage": usage}
            await send(writer, 200, fault.body or json.dumps(answer).encode())
            return
        await self._stream(body, usage, reader, writer)

    async def _stream(
        self,
        body: dict[str, Any],
        usage: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        script = self.script
        fault = self.script.fault or Fault()
        await send_head(writer, 200, "text/event-stream")
        script.open_streams += 1
        gone = asyncio.create_task(reader.read())
        try:
            if fault.body is not None:
                writer.write(fault.body)
                await writer.drain()
                return
            async for event in self._events(body, usage, fault):
                if gone.done():
                    return
                writer.write(event)
                await writer.drain()
        finally:
            gone.cancel()
            script.open_streams -= 1

    async def _events(
        self, body: dict[str, Any], usage: dict[str, Any], fault: Fault
    ) -> AsyncIterator[bytes]:
        for _ in range(fault.comments):
            yield b": still here\n\n"
            await asyncio.sleep(0.01)
        end = [*body["stop_token_ids"][:1]]
        tokens = [*self.answer, *end] if end else self.answer * 100
        tokens = tokens[: body["max_tokens"]]
        for index, token in enumerate(tokens):
            if fault.after is not None and index >= fault.after:
                if fault.reason is None:
                    return
                yield event({"choices": [{"token_ids": [], "finish_reason": fault.reason}]})
                break
            reason = None
            if index == len(tokens) - 1:
                reason = "stop" if end and token == end[0] else "length"
            yield event({"choices": [{"token_ids": [token], "finish_reason": reason}]})
            await asyncio.sleep(self.script.token_seconds)
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def send_head(writer: asyncio.StreamWriter, status: int, kind: str) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()


async def send(writer: asyncio.StreamWriter, status: int, answer: bytes) -> None:
    await send_head(writer, status, "application/json")
    writer.write(answer)
    await writer.drain()


@contextmanager
def serving_script(script: Script, kind: type[ScriptedVllm] = ScriptedVllm) -> Iterator[str]:
    """The URL of a scripted server, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stand_in = kind(script)

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)

    async def end() -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
