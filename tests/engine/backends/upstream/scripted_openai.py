"""A scripted stand-in for any server of OpenAI's chat completions. It knows no scopes."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engine.protocol import Message, Prompt, TextPart
from engine.settings import DEMO_MODEL
from engine.text.renderer import ChatRenderer
from tests.engine.backends.upstream.scripted import ANSWER, Fault, Script, ScriptedVllm, event, send

WORDS = [word + " " for word in ANSWER.split(" ")]


class ScriptedOpenAi(ScriptedVllm):
    generation = "/v1/chat/completions"

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._renderer = ChatRenderer.from_model(DEMO_MODEL)

    def _look(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path != "/v1/models":
            return 404, b"{}"
        model = {
            "id": "demo",
            "owned_by": "somebody",
            "max_model_len": self.script.context,
            "root": self.script.model,
        }
        return 200, json.dumps({"data": [model]}).encode()

    def _tokens(self, contents: list[Any]) -> Sequence[int] | None:
        """Those of the users' messages; None for what it does not take."""
        prompt = Prompt([Message("user", [TextPart(text or "")]) for text in contents])
        return self._renderer.render(prompt, thinking=False).token_ids

    async def _complete(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = self.script.fault or Fault()
        if fault.status != 200:
            await send(writer, fault.status, b"{}")
            return
        tokens = self._tokens([m["content"] for m in body["messages"] if m["role"] == "user"])
        if tokens is None:
            await send(writer, 400, b"{}")
            return
        usage: dict[str, Any] = {"prompt_tokens": len(tokens)}
        reused = self.script.reuse({"prompt": list(tokens)})
        if self.script.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": reused}
        usage |= fault.usage or {}
        if not body["stream"]:
            await send(writer, 200, json.dumps({"choices": [], "usage": usage}).encode())
            return
        await self._stream(body, usage, reader, writer)

    async def _events(
        self, body: dict[str, Any], usage: dict[str, Any], fault: Fault
    ) -> AsyncIterator[bytes]:
        if "tools" in body:
            call = {"index": 0, "id": "call_1", "function": {"name": "paint", "arguments": ""}}
            deltas: list[dict[str, Any]] = [
                {"reasoning_content": "Hm."},
                {"tool_calls": [call]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '{"colour": '}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '"blue"}'}}]},
            ]
            reason = "tool_calls"
        else:
            words = WORDS[: body["max_tokens"]]
            deltas = [{"role": "assistant", "content": ""}, *({"content": w} for w in words)]
            reason = "stop" if len(words) == len(WORDS) else "length"
        for index, delta in enumerate(deltas):
            if fault.after is not None and index > fault.after:
                if fault.reason is None:
                    return
                reason = fault.reason
                break
            yield event({"choices": [{"delta": delta, "finish_reason": None}]})
            await asyncio.sleep(self.script.token_seconds)
        yield event({"choices": [{"delta": {}, "finish_reason": reason}]})
        sampled = index if fault.reason else min(body["max_tokens"], 12)
        yield event({"choices": [], "usage": usage | {"completion_tokens": sampled}})
        yield b"data: [DONE]\n\n"
