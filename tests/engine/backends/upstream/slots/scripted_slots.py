"""A scripted `llama-server` with slot files: it computes nothing, and its files are real.

What it does with a file that is not whole is what build 11434 was seen to do: it aborts at a
truncated one, and takes one with a flipped bit as if nothing were wrong.
"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.backends.upstream.scripted import Fault, ScriptedVllm, send
from tests.engine.backends.upstream.scripted_llamacpp import ScriptedLlamaCpp, SlotScript, common

TOKEN_BYTES = 256
_HEAD = struct.Struct("<4sII")


@dataclass
class FileScript(SlotScript):
    """`folder` is `--slot-save-path`; None: it was started without.

    `is_unified`, `clears_idle`, `has_window`, `is_exact_only` are what flags and models do; `full`
    is a full disk. `processing` are the slots that something runs in. In those of `ends_late` an
    answer goes on behind its last word.
    """

    folder: Path | None = None
    model_file: str = ""
    is_unified: bool = False
    clears_idle: bool = False
    has_window: bool = False
    is_exact_only: bool = False
    speculates: bool = False
    sees: bool = False
    num_adapters: int = 0
    is_full: bool = False
    weights: int = 1
    restored_short: bool = False
    aborted: bool = False
    seen_busy: bool = False
    tasks: list[int | None] = field(default_factory=list)
    restored: list[bool] = field(default_factory=list)
    processing: set[int] = field(default_factory=set)
    ends_late: set[int] = field(default_factory=set)
    actions: list[tuple[str, int]] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """As after a start: nothing is in its slots."""
        self.slots = [[] for _ in self.slots]
        self.tasks = [None for _ in self.slots]
        self.restored = [False for _ in self.slots]
        self.aborted = False

    def reuse_in_slot(self, body: dict[str, Any]) -> int:
        number = body["id_slot"]
        tokens = body["prompt"]
        slot_tokens = self.slots[number]
        alike = common(slot_tokens, tokens)
        if self.has_window and self.restored[number]:
            alike = 0
        if self.is_exact_only and alike < len(slot_tokens):
            alike = 0
        if self.shares_ram:
            alike = max([alike, *(common(cached, tokens) for cached in self.ram)])
            self.ram.append(tokens)
        if not body["cache_prompt"] and not self.ignores_wish:
            alike = 0
        if self.clears_idle:
            self.slots = [[] for _ in self.slots]
        self.slots[number] = list(tokens)
        self.restored[number] = False
        self.tasks[number] = len(self.seen)
        reused = min(alike, len(tokens) - 1)
        self.prefills.append(len(tokens) - reused)
        return reused

    def save(self, number: int, name: str) -> tuple[int, bytes]:
        assert self.folder is not None
        if self.is_full:
            (self.folder / name).write_bytes(b"ggsq")
            return 500, b'{"error": {"message": "Unable to save slot"}}'
        tokens = self.slots[number]
        num_streams = 1 if self.is_unified else len(self.slots)
        content = _HEAD.pack(b"ggsq", 2, len(tokens)) + struct.pack(f"<{len(tokens)}I", *tokens)
        content += struct.pack("<I", num_streams)
        content += b"".join(bytes([(token + self.weights) % 256]) * TOKEN_BYTES for token in tokens)
        (self.folder / name).write_bytes(content)
        return 200, json.dumps({"n_saved": len(tokens), "n_written": len(content)}).encode()

    def restore(self, number: int, name: str) -> tuple[int, bytes] | None:
        """None: it has aborted."""
        assert self.folder is not None
        place = self.folder / name
        content = place.read_bytes() if place.exists() else b""
        if not content.startswith(b"ggsq"):
            self.slots[number] = []
            return 400, b'{"error": {"message": "Unable to restore slot"}}'
        _, _, count = _HEAD.unpack_from(content)
        if len(content) != _HEAD.size + 4 * count + 4 + TOKEN_BYTES * count:
            self.aborted = self.is_down = True
            return None
        tokens = list(struct.unpack_from(f"<{count}I", content, _HEAD.size))
        self.slots[number] = tokens[: count // 2] if self.restored_short else tokens
        self.restored[number] = True
        return 200, json.dumps({"n_restored": count}).encode()


class ScriptedSlots(ScriptedLlamaCpp):
    script: FileScript

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ScriptedVllm.serve(self, reader, writer)

    def _look(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        script = self.script
        if path == "/props":
            props = {
                "total_slots": len(script.slots),
                "default_generation_settings": {"n_ctx": script.context},
                "model_path": script.model_file,
                "build_info": "scripted",
                "modalities": {"vision": script.sees},
            }
            return 200, json.dumps(props).encode()
        if path == "/lora-adapters":
            return 200, json.dumps([{}] * script.num_adapters).encode()
        if path == "/slots":
            return 200, json.dumps([self._state(n) for n in range(len(script.slots))]).encode()
        if path.startswith("/slots/"):
            return self._act(path, body)
        return super()._look(path, body)

    def _state(self, number: int) -> dict[str, Any]:
        task = self.script.tasks[number]
        return {
            "id": number,
            "n_ctx": self.script.context,
            "speculative": self.script.speculates,
            "is_processing": number in self.script.processing,
        } | ({} if task is None else {"id_task": task})

    def _act(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        script = self.script
        number = int(path.removeprefix("/slots/").partition("?")[0])
        action = path.partition("action=")[2]
        script.actions.append((action, number))
        script.seen_busy |= number in script.processing
        if script.folder is None:
            return 501, b'{"error": {"message": "Start it with `--slot-save-path`"}}'
        if action == "save":
            return script.save(number, body["filename"])
        if action == "erase":
            script.slots[number] = []
            return 200, b'{"n_erased": 0}'
        return script.restore(number, body["filename"]) or (500, b"{}")

    async def _complete(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = self.script.fault or Fault()
        if fault.status != 200:
            await send(writer, fault.status, b'{"error": {"code": 500}}')
            return
        number = body["id_slot"]
        self.script.seen_busy |= number in self.script.processing
        self.script.processing.add(number)
        try:
            cached = self.script.reuse_in_slot(body)
            await self._stream(body, {"cache_n": cached}, reader, writer)
        finally:
            self._let_go(body)

    async def _events(
        self, body: dict[str, Any], usage: dict[str, Any], fault: Fault
    ) -> AsyncIterator[bytes]:
        async for event in super()._events(body, usage, fault):
            # The server has let go of the slot before anybody reads its last word.
            if b'"stop": true' in event:
                self._let_go(body)
            yield event

    def _let_go(self, body: dict[str, Any]) -> None:
        """A prompt that is computed alone is over with its only token."""
        number = body["id_slot"]
        if number not in self.script.ends_late or body["n_predict"] == 1:
            self.script.processing.discard(number)


def write_model(place: Path, *, architecture: str = "llama", window: int = 0) -> None:
    """A GGUF file with as much metadata as is read."""
    metadata = [_text("general.architecture", architecture)]
    if window:
        key = f"{architecture}.attention.sliding_window"
        metadata.append(_key(key) + struct.pack("<II", 4, window))
    metadata.append(_key("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + 2 * _string("a"))
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(metadata))
    place.write_bytes(head + b"".join(metadata) + b"weights")


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


_key = _string


def _text(key: str, value: str) -> bytes:
    return _key(key) + struct.pack("<I", 8) + _string(value)
