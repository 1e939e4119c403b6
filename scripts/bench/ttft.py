"""Time to first token with and without a cached prefix, through the whole system.

Makes a Llama-style model with random weights (`--hidden`, `--layers`) around the demo model's
tokenizer, serves it with a real engine and gateway, and asks over the official SDK, streaming: a
cold prompt, then the same one again with another question. Every figure is measured; the usage
beside it is what the API returned.
"""

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from anthropic import Anthropic
from transformers import AutoModelForCausalLM, LlamaConfig

from scripts.stack import API_KEY, running_stack

ROOT = Path(__file__).resolve().parents[2]

DEMO_MODEL = ROOT / "engine" / "demo_model"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prefix")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "bench-model"
        parameters = make_model(model, options.hidden, options.layers, 2 * options.tokens)
        settings = {
            "ENGINE_MODEL": str(model),
            "ENGINE_LOG_LEVEL": "warning",
            "ENGINE_THREADS": str(options.threads),
        }
        with running_stack(Path(work) / "data", engine_settings=settings) as stack:
            client = Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=600)
            rounds = [measure(client, options.tokens, index) for index in range(options.rounds)]
    report(rounds, parameters, options.threads)
    return 0


def make_model(directory: Path, hidden: int, layers: int, context: int) -> int:
    """Write a random-weight model; returns its number of parameters."""
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
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
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    return sum(parameter.numel() for parameter in model.parameters())


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


def report(
    rounds: list[tuple[tuple[float, dict[str, int]], ...]], parameters: int, threads: int
) -> None:
    print(f"{platform.machine()}, {threads} threads, torch {torch.__version__}")
    print(f"random weights, {parameters / 1e6:.1f} M parameters, float32\n")
    print("round  uncached s  usage (input, written, read)   cached s  usage             ratio")
    ratios = []
    for index, ((cold, cold_usage), (warm, warm_usage)) in enumerate(rounds, start=1):
        ratios.append(cold / warm)
        print(
            f"{index:>5}  {cold:>10.3f}  {tuple(cold_usage.values())!s:<29}  {warm:>8.4f}"
            f"  {tuple(warm_usage.values())!s:<16}  {cold / warm:>5.1f}"
        )
    print(f"\nmedian: {statistics.median(ratios):.1f} times shorter with the prefix cached")


if __name__ == "__main__":
    sys.exit(main())
