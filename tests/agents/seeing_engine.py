"""The engine on vLLM over a tiny model that sees, which writes what a script says.

All is real but the text: vLLM computes each prompt, its images too, and its tokens, reads and
leases are counted. `SCRIPTED_SCRIPT` is what `tests/scripted_engine.py` has. Run by VLLM_PYTHON.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from engine import __main__ as program
from engine.backends.base import Progress
from engine.backends.external import Order
from engine.backends.vllm import backend
from engine.backends.vllm.backend import VllmParts
from engine.backends.vllm.core import Output, VllmCore
from engine.backends.vllm.directive import Directive
from engine.settings import Settings
from engine.text.renderer import ChatRenderer


class ScriptedCore(VllmCore):
    """A scope's requests with tools get the texts of `turn 1`, `turn 2` and so on."""

    def __init__(self, core: VllmCore, renderer: ChatRenderer, script: Mapping[str, str]) -> None:
        self.__dict__.update(vars(core))
        self._renderer = renderer
        self._script = script
        self._num_turns: Counter[str] = Counter()

    async def generate(self, order: Order, directive: Directive) -> AsyncIterator[Output]:
        name = ""
        if order.request.prompt.tools:
            self._num_turns[order.scope] += 1
            name = f"turn {self._num_turns[order.scope]}"
        text = self._script.get(name, "scripted")
        token_ids = self._renderer.tokenizer.encode(text, add_special_tokens=False).ids
        token_ids += sorted(self._renderer.end_token_ids)[:1]
        async for output in super().generate(order, directive):
            yield replace(output, token_ids=token_ids if output.token_ids else [])
            token_ids = []


def load(settings: Settings, progress: Progress) -> VllmParts:
    parts = _load(settings, progress)
    script = json.loads(os.environ["SCRIPTED_SCRIPT"])
    return replace(parts, core=ScriptedCore(parts.core, parts.renderer, script))


_load = backend.load_vllm

if __name__ == "__main__":
    backend.load_vllm = load
    sys.exit(program.main(["--backend", "vllm"]))
