"""Time to first token of a base model, then of an adapter, then of the base model again.

A real engine serves a Llama-style model with random weights and two adapters of it: LoRA, which
acts on the whole prompt, and activated LoRA, which acts from its invocation in the question on. The
official SDK asks a real gateway. Every figure is measured. The usage is what the API returned.
"""

import json
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from anthropic import Anthropic
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from scripts.bench.common import MODEL_OPTIONS, bench_model, renderer_of, text_of_tokens
from scripts.bench.report import table
from scripts.bench.ttft import ask
from scripts.setup.options import parse
from scripts.stack import API_KEY, running_stack

INVOCATION = " judge now:"
RANK = 32
KINDS = {"LoRA": "whole", "activated LoRA": "activated"}


def main() -> int:
    options = parse(
        __doc__, tokens=(8192, "length of the prefix"), rounds=2, threads=1, **MODEL_OPTIONS
    )
    rows = []
    with (
        bench_model(options.hidden, options.layers, 2 * options.tokens) as model,
        tempfile.TemporaryDirectory() as data,
    ):
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        invocation = tokenizer.encode(INVOCATION, add_special_tokens=False).ids
        write_adapter(model, Path(data, "adapters", "whole"), None)
        write_adapter(model, Path(data, "adapters", "activated"), invocation)
        settings = {
            "ENGINE_MODEL": str(model),
            "ENGINE_ADAPTERS": str(Path(data, "adapters")),
            "ENGINE_LOG_LEVEL": "warning",
            "OMP_NUM_THREADS": str(options.threads),
        }
        render = renderer_of(model)
        with running_stack(Path(data, "gateway"), engine_settings=settings) as stack:
            client = Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=600)
            for number, (kind, name) in product(range(1, options.rounds + 1), KINDS.items()):
                text = text_of_tokens(render, f"Round {number}, {name}", options.tokens)
                row = [str(number), kind]
                for side in (model.name, f"{model.name}:{name}", model.name):
                    seconds, usage = ask(client, text, f"a lease?{INVOCATION} is it so", side)
                    row += [f"{seconds:.3f}", usage]
                rows.append(tuple(row))
    print(f"{options.threads} threads; usage is (input, written, read)\n")
    turns = ["base", "usage", "adapter", "usage", "base again", "usage"]
    print(table(("round", "adapter", *turns), rows))
    return 0


def write_adapter(model: Path, directory: Path, invocation: list[int] | None) -> None:
    """Random weights on the projections of queries and values, as PEFT writes them."""
    directory.mkdir(parents=True)
    torch.manual_seed(1)
    weights = {}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in list(file.keys()):
            if name.endswith(("q_proj.weight", "v_proj.weight")):
                outputs, inputs = file.get_slice(name).get_shape()
                place = f"base_model.model.{name.removesuffix('.weight')}"
                weights[f"{place}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
                weights[f"{place}.lora_B.weight"] = torch.randn(outputs, RANK) / RANK
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config["alora_invocation_tokens"] = invocation
    (directory / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main())
