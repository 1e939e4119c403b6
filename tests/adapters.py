"""Adapters with random weights, written as PEFT writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

INVOCATION = " judge now:"
"""A text that is the same tokens wherever it stands."""


def invocation_of(model: Path) -> list[int]:
    auto: Any = AutoTokenizer
    tokens: list[int] = auto.from_pretrained(model)(INVOCATION)["input_ids"]
    return tokens


def write_adapter(
    model: Path | PreTrainedModel,
    directory: Path,
    seed: int = 1,
    *,
    targets: str | Sequence[str] = "all-linear",
    std: float = 0.3,
    **config: Any,
) -> Any:
    """Write one for a model, and return PEFT's own model with it. It takes over what it is given.

    Weights are drawn with a standard deviation of `std`, so that answers change.
    """
    # Each process that collects tests would take seconds to import it.
    from peft import LoraConfig, get_peft_model

    auto: Any = AutoModelForCausalLM
    base = model if isinstance(model, PreTrainedModel) else auto.from_pretrained(model)
    targets = targets if isinstance(targets, str) else list(targets)
    torch.manual_seed(seed)
    lora_config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **config)
    peft = get_peft_model(base, lora_config).eval()
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=std)
    peft.save_pretrained(directory, save_embedding_layers=False)
    return peft
