"""Time to first token with and without a cached prefix, through the whole system.

Makes a Llama-style model with random weights (`--hidden`, `--layers`) around the demo model's
tokenizer, serves it with a real engine and gateway, and asks over the official SDK, streaming: a
cold prompt, then the same one again with another question. Every figure is measured; the usage
beside it is what the API returned.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from anthropic import Anthropic

from scripts.bench.common import add_model_arguments, bench_model
from scripts.bench.report import table
from scripts.stack import API_KEY, running_stack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prefix")
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    with (
        bench_model(options.hidden, options.layers, 2 * options.tokens) as model,
        tempfile.TemporaryDirectory() as data,
    ):
        settings = {
            "ENGINE_MODEL": str(model.path),
            "ENGINE_LOG_LEVEL": "warning",
            "ENGINE_THREADS": str(options.threads),
        }
        with running_stack(Path(data), engine_settings=settings) as stack:
            client = Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=600)
            rounds = [measure(client, options.tokens, index) for index in range(options.rounds)]
    report(rounds, options.threads)
    return 0


def measure(client: Anthropic, tokens: int, index: int) -> tuple[tuple[float, dict[str, int]], ...]:
    """Seconds to the first token and the usage: cold, then cached."""
    text = prefix(client, tokens, index)
    return ask(client, text, "What is a lease?"), ask(client, text, "What is an entry?")


def prefix(client: Anthropic, tokens: int, index: int) -> str:
    """A text of about `tokens` tokens that no earlier round had."""
    line = f"Round {index}: a policy that the reader may quote but not change, item "
    count = client.messages.count_tokens(
        model="bench-model", messages=[{"role": "user", "content": f"{line}1000.\n" * 100}]
    ).input_tokens
    return "".join(f"{line}{1000 + i}.\n" for i in range(tokens * 100 // count))


def ask(client: Anthropic, system: str, question: str) -> tuple[float, dict[str, int]]:
    started = time.perf_counter()
    with client.messages.stream(
        model="bench-model",
        max_tokens=4,
        system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": question}],
    ) as stream:
        first = 0.0
        for event in stream:
            if event.type == "content_block_start" and not first:
                first = time.perf_counter() - started
        usage = stream.get_final_message().usage
    counts = {
        "input": usage.input_tokens,
        "written": usage.cache_creation_input_tokens or 0,
        "read": usage.cache_read_input_tokens or 0,
    }
    return first, counts


def report(rounds: list[tuple[tuple[float, dict[str, int]], ...]], threads: int) -> None:
    rows = [
        (
            str(index),
            f"{cold:.3f}",
            f"{tuple(cold_usage.values())}",
            f"{warm:.4f}",
            f"{tuple(warm_usage.values())}",
            f"{cold / warm:.1f}",
        )
        for index, ((cold, cold_usage), (warm, warm_usage)) in enumerate(rounds, start=1)
    ]
    print(f"{threads} threads; usage is (input, written, read)\n")
    print(table(("round", "uncached s", "usage", "cached s", "usage", "ratio"), rows))
    ratio = statistics.median(cold / warm for (cold, _), (warm, _) in rounds)
    print(f"\nmedian: {ratio:.1f} times shorter with the prefix cached")


if __name__ == "__main__":
    sys.exit(main())
