"""What the engine's benchmarks share: an engine to ask, a model, and texts of a length."""

import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from engine import protocol
from engine.backends.local import LocalBackend
from engine.backends.native import load_native
from engine.backends.synthetic import load_synthetic
from engine.backends.synthetic_renderer import SyntheticRenderer
from engine.clock import MonotonicClock
from engine.settings import Settings
from engine.text.renderer import ChatRenderer
from scripts.bench.report import machine_line
from scripts.stack import ROOT

DEMO_MODEL = ROOT / "engine" / "holdfast-demo"
BLOCK_SIZE = 16
MODEL_OPTIONS = {"hidden": (512, "size of the model's hidden states"), "layers": 8}
"""Options of a benchmark that makes a model by `bench_model`."""


def new_settings(**changes: object) -> Settings:
    """The engine's defaults with `changes`. The environment's ENGINE_* count as always."""
    # The secret protects nothing, because no server listens.
    fixed = {"secret": "none-for-benchmarks", "log_level": "warning", "block_size": BLOCK_SIZE}
    return Settings.model_validate(fixed | changes)


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An engine's answer, with its times."""

    usage: protocol.InputUsage
    output_tokens: int
    # The time to the first frame.
    first_seconds: float
    # The time to the last frame.
    seconds: float


@asynccontextmanager
async def running_backend(settings: Settings) -> AsyncIterator[LocalBackend]:
    """The whole backend in this process: its own thread steps it, no HTTP in between."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load = load_synthetic if settings.backend == "synthetic" else load_native
    backend = LocalBackend(settings, MonotonicClock(), load, _crash)
    await asyncio.to_thread(backend.load, lambda _stage, _fraction: None)
    try:
        yield backend
    finally:
        await backend.stop()


def _crash(error: BaseException) -> None:
    print(f"the engine's thread ended: {error!r}", file=sys.stderr)
    os._exit(1)


async def ask(backend: LocalBackend, request: protocol.GenerateRequest) -> EngineAnswer:
    """Run a request to its end. Raise RuntimeError if it fails."""
    begun = time.perf_counter()
    first_seconds = 0.0
    usage = None
    async for frame in await backend.open(request):
        match frame:
            case protocol.Started():
                usage = frame.usage
                first_seconds = time.perf_counter() - begun
            case protocol.Failed():
                raise RuntimeError(f"{request.request_id}: {frame.message}")
            case protocol.Done():
                assert usage is not None
                seconds = time.perf_counter() - begun
                return EngineAnswer(usage, frame.output_tokens, first_seconds, seconds)
    raise RuntimeError(f"{request.request_id}: the frames ended early")


def new_request(
    request_id: str, system: str, question: str, *, max_tokens: int, is_marked: bool = True
) -> protocol.GenerateRequest:
    """One system block, marked or not, and one question; greedy."""
    message = protocol.Message("user", [protocol.TextPart(question)])
    return protocol.GenerateRequest(
        request_id=request_id,
        scope="bench",
        prompt=protocol.Prompt([message], system=[protocol.TextPart(system)]),
        sampling=protocol.Sampling(max_tokens=max_tokens, temperature=0),
        breakpoints=[protocol.Breakpoint(0)] if is_marked else [],
    )


Render = Callable[[protocol.GenerateRequest], list[int]]


def renderer_of(model: Path | None) -> Render:
    """A function that makes token ids of a request's prompt. Without a model it is the synthetic
    engine's."""
    renderer = SyntheticRenderer() if model is None else ChatRenderer.from_model(str(model))
    render = partial(renderer.render, thinking=False, scope="bench")
    return lambda request: render(request.prompt).token_ids


def text_of_tokens(render: Render, label: str, num_tokens: int) -> str:
    """Lines of prose with `num_tokens` tokens, or a line more. A text of another label begins
    differently."""

    def lines(number: int) -> str:
        line = f"{label}: a policy that the reader may quote but not change, item "
        return "".join(f"{line}{1000 + i}.\n" for i in range(number))

    def count(number: int) -> int:
        return len(render(new_request("", lines(number), "?", max_tokens=1)))

    tokens_of_50_lines = count(51) - count(1)
    return lines(math.ceil(50 * num_tokens / tokens_of_50_lines))


@contextmanager
def bench_model(hidden: int, layers: int, context: int) -> Iterator[Path]:
    """A Llama-style model with random weights around the demo model's tokenizer, for a while.

    Prints the machine and the model's size.
    """
    demo = json.loads((DEMO_MODEL / "config.json").read_text("utf-8"))
    config = LlamaConfig(
        vocab_size=demo["vocab_size"],
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=demo["eos_token_id"],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench-model"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        model.save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO_MODEL / name, path / name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        print(machine_line())
        print(f"random weights, {parameters / 1e6:.1f} M parameters, float32", flush=True)
        yield path
