"""Time to first token with and without a cached prefix, through the whole system.

A real engine serves a Llama-style model with random weights around the demo model's tokenizer. The
official SDK asks a real gateway, streaming: a cold prompt, then the same one again with another
question. Every figure is measured; the usage beside it is what the API returned.
"""

import statistics
import sys
import tempfile
from math import nan
from pathlib import Path

import torch
from anthropic import Anthropic

from scripts.bench.common import MODEL_OPTIONS, bench_model, text_of_tokens
from scripts.bench.load import Answer, ask_by_sdk, body_of
from scripts.bench.report import table
from scripts.setup.options import parse
from scripts.stack import API_KEY, running_stack

MODEL = "bench-model"
SUBJECTS = ("a lease", "an entry")
CLASSES = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def main() -> int:
    options = parse(
        __doc__,
        tokens=(8192, "length of the prefix"),
        rounds=3,
        threads=torch.get_num_threads(),
        **MODEL_OPTIONS,
    )
    with (
        bench_model(options.hidden, options.layers, 2 * options.tokens) as model,
        tempfile.TemporaryDirectory() as data,
    ):
        settings = {
            "ENGINE_MODEL": str(model.path),
            "ENGINE_LOG_LEVEL": "warning",
            "ENGINE_THREADS": str(options.threads),
        }
        texts = [
            text_of_tokens(model.count, f"Round {index}", options.tokens)
            for index in range(options.rounds)
        ]
        with running_stack(Path(data), engine_settings=settings) as stack:
            client = Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=600)
            rounds = [
                [ask(client, text, what) for what in ("a lease", "an entry")] for text in texts
            ]
    report(rounds, options.threads)
    return 0


def ask(client: Anthropic, system: str, what: str) -> Answer:
    return ask_by_sdk(client, body_of(MODEL, system, f"What is {what}?", max_tokens=4))


def report(rounds: list[list[Answer]], threads: int) -> None:
    """Each round is the uncached answer and the cached one."""
    print(f"{threads} threads; usage is (input, written, read)\n")
    rows, ratios = [], []
    for index, (cold, warm) in enumerate(rounds, start=1):
        uncached, cached = cold.first_seconds or nan, warm.first_seconds or nan
        ratios.append(uncached / cached)
        seconds = f"{uncached:.3f}", f"{cached:.4f}"
        usages = [str(tuple(one.usage[name] for name in CLASSES)) for one in (cold, warm)]
        rows.append((str(index), seconds[0], usages[0], seconds[1], usages[1], f"{ratios[-1]:.1f}"))
    print(table(("round", "uncached s", "usage", "cached s", "usage", "ratio"), rows))
    ratio = statistics.median(ratios)
    print(f"\nmedian: {ratio:.1f} times shorter with the prefix cached")


if __name__ == "__main__":
    sys.exit(main())
