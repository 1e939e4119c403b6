"""Time to first token with and without a cached prefix, through the whole system.

A real engine serves a Llama-style model with random weights around the demo model's tokenizer. The
official SDK asks a real gateway, streaming: a cold prompt, then the same one again with another
question. Every figure is measured. The usage beside it is what the API returned.
"""

import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from anthropic import Anthropic

from scripts.bench.common import MODEL_OPTIONS, bench_model, renderer_of, text_of_tokens
from scripts.bench.load import body_of
from scripts.bench.report import table
from scripts.setup.options import parse
from scripts.stack import API_KEY, running_stack

CLASSES = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def main() -> int:
    options = parse(
        __doc__,
        tokens=(8192, "length of the prefix"),
        rounds=3,
        threads=torch.get_num_threads(),
        **MODEL_OPTIONS,
    )
    rows = []
    ratios = []
    with (
        bench_model(options.hidden, options.layers, 2 * options.tokens) as model,
        tempfile.TemporaryDirectory() as data,
    ):
        settings = {
            "ENGINE_MODEL": str(model),
            "ENGINE_LOG_LEVEL": "warning",
            "OMP_NUM_THREADS": str(options.threads),
        }
        render = renderer_of(model)
        with running_stack(Path(data), engine_settings=settings) as stack:
            client = Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=600)
            for number in range(1, options.rounds + 1):
                text = text_of_tokens(render, f"Round {number}", options.tokens)
                uncached, usage = ask(client, text, "a lease")
                cached, usage_again = ask(client, text, "an entry")
                ratios.append(uncached / cached)
                figures = f"{uncached:.3f}", usage, f"{cached:.4f}", usage_again
                rows.append((str(number), *figures, f"{ratios[-1]:.1f}"))
    print(f"{options.threads} threads; usage is (input, written, read)\n")
    print(table(("round", "uncached s", "usage", "cached s", "usage", "ratio"), rows))
    print(f"\nmedian: {statistics.median(ratios):.1f} times shorter with the prefix cached")
    return 0


def ask(
    client: Anthropic, system: str, question: str, model: str = "bench-model"
) -> tuple[float, str]:
    """Seconds to the first content block, and the usage."""
    begun = time.perf_counter()
    first_seconds = float("nan")
    with client.messages.stream(
        **body_of(model, system, f"What is {question}?", max_tokens=4)
    ) as stream:
        for event in stream:
            if event.type == "content_block_start" and math.isnan(first_seconds):
                first_seconds = time.perf_counter() - begun
        usage = stream.get_final_message().usage
    return first_seconds, str(tuple(getattr(usage, name) for name in CLASSES))


if __name__ == "__main__":
    sys.exit(main())
