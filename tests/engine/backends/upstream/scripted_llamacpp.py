"""A scripted stand-in for llama.cpp's `llama-server`: slots, and the events of `/completion`.

The events are as the real server (0.25, of llama-cpp-python 0.3.36's source) was seen to send them,
the progress events with a token that was not sampled included.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.engine.backends.upstream.scripted import Fault, Script, ScriptedVllm, event, send

SLOTS = 2


@dataclass
class SlotScript(Script):
    """`shares_ram`: what a slot loses goes into a cache that all slots read (`--cache-ram`).

    `is_mute`: the model ends its turn with nothing said. `prefill_seconds`: how long it computes
    before its first token.
    """

    slots: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    shares_ram: bool = False
    ram: list[list[int]] = field(default_factory=list)
    ignores_wish: bool = False
    is_mute: bool = False
    prefill_seconds: float = 0.0

    def reuse_in_slot(self, body: dict[str, Any]) -> int:
        tokens = body["prompt"]
        number = body["id_slot"]
        cached_prompts = [self.slots[number], *(self.ram if self.shares_ram else [])]
        reused = max(common(cached, tokens) for cached in cached_prompts)
        if not body["cache_prompt"] and not self.ignores_wish:
            reused = 0
        self.ram.append(self.slots[number])
        self.slots[number] = tokens
        return min(reused, len(tokens) - 1)


def common(first: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),
    )


class ScriptedLlamaCpp(ScriptedVllm):
    generation = "/completion"
    script: SlotScript

    def _look(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/detokenize":
            text = self.tokenizer.decode(body["tokens"], skip_special_tokens=False)
            return 200, json.dumps({"content": text}).encode()
        answers: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": "demo.gguf", "owned_by": "llamacpp"}]},
            "/props": {
                "total_slots": SLOTS,
                "default_generation_settings": {"n_ctx": self.script.context},
                "model_path": f"/models/{self.script.model}.gguf",
                "build_info": "scripted",
            },
        }
        if path not in answers:
            return 404, b"{}"
        return 200, json.dumps(answers[path]).encode()

    async def _complete(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = self.script.fault or Fault()
        if fault.status != 200:
            await send(writer, fault.status, b'{"error": {"code": 500}}')
            return
        await self._stream(body, {"cache_n": self.script.reuse_in_slot(body)}, reader, writer)

    async def _events(
        self, body: dict[str, Any], usage: dict[str, Any], fault: Fault
    ) -> AsyncIterator[bytes]:
        counts: dict[str, Any] = {
            "tokens_evaluated": len(body["prompt"]),
            "timings": usage | (fault.usage or {}),
        }
        yield event({"tokens": [0], "stop": False, "prompt_progress": {"total": 1}} | counts)
        await asyncio.sleep(self.script.prefill_seconds)
        if self.script.is_mute and not body["ignore_eos"]:
            yield event({"tokens": [], "stop": True, "stop_type": "eos"} | counts)
            return
        end = [] if body["ignore_eos"] else [2]
        tokens = ([*self.answer, *end] if end else self.answer * 100)[: body["n_predict"]]
        for index, token in enumerate(tokens):
            if fault.after is not None and index >= fault.after:
                return
            yield event({"tokens": [token], "stop": False} | counts)
            await asyncio.sleep(self.script.token_seconds)
        reason = "eos" if end and tokens[-1:] == end else "limit"
        yield event({"tokens": [], "stop": True, "stop_type": reason} | counts)
