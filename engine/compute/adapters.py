"""LoRA adapters: PEFT's directories, and what they add to the rows of a step.

An adapter adds `scale · B(A x)` to the output of linear layers (Hu et al. 2021). An activated one
does so from the last occurrence of its invocation in the prompt on (Greenewald et al. 2025), so the
keys and values before that are the base model's. Hooks are on the model for the steps that have
an adapter's rows, and for no others. An adapter that can't be computed exactly is refused.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from engine.compute.errors import ModelRefused
from engine.schedule.runner import Work

MAX_RANK = 512
MAX_ALPHA = 1e6
MAX_BYTES = 2 * 2**30
"""Of one adapter's file."""
MAX_CONFIG_BYTES = 2**20
MAX_INVOCATION = 256
"""Tokens of an invocation."""

# Fields of adapter_config.json that change nothing of what a loaded adapter computes, and those
# that are read here. Any other one may, and is refused where it is set.
_NO_MATTER = frozenset(
    """task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    target_modules exclude_modules lora_dropout layers_to_transform layers_pattern megatron_core
    loftq_config eva_config qalora_group_size ensure_weight_tying""".split()
)
_READ = frozenset(
    """peft_type r lora_alpha use_rslora rank_pattern alpha_pattern bias init_lora_weights
    alora_invocation_tokens""".split()
)
# Other ways to begin change the base model's own weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_WEIGHT = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class LowRank(NamedTuple):
    """What is added at one linear layer. `a` is (rank, inputs), `b` is (outputs, rank)."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """`digest` is the SHA-256 of its weights, scales and invocation, `layers` go by modules' names.

    It acts behind the first token of the last `invocation` in a prompt, that one included; where
    there is no invocation, on all of it.
    """

    digest: str
    rank: int
    num_bytes: int
    invocation: Sequence[int]
    layers: Mapping[str, LowRank]


def load_adapter(directory: Path, model: PreTrainedModel) -> Adapter:
    """Read and check a PEFT directory. Raise ModelRefused, which names what is not supported."""
    config = _read_config(directory)
    invocation = config.get("alora_invocation_tokens") or []
    are_tokens = isinstance(invocation, list) and all(type(one) is int for one in invocation)
    if not are_tokens or len(invocation) > MAX_INVOCATION:
        raise ModelRefused(f"`alora_invocation_tokens`: not a list of {MAX_INVOCATION} ids or less")
    if any(not 0 <= token < model.config.vocab_size for token in invocation):
        raise ModelRefused("`alora_invocation_tokens`: an id that the model does not have")
    modules = dict(model.named_modules())
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _read_tensors(directory / "adapter_model.safetensors").items():
        found = _WEIGHT.fullmatch(name)
        if found is None:
            raise ModelRefused(f"`{name[:128]}`: no weight of LoRA's")
        _check_module(modules, found["module"], model)
        sides.setdefault(found["module"], {})[found["side"]] = tensor
    if not sides:
        raise ModelRefused("adapter_model.safetensors: no weights")
    state = sha256(f"{invocation}\n".encode() if invocation else b"")
    layers, num_bytes = dict[str, LowRank](), 0
    for name, pair in sorted(sides.items()):
        module = modules[name]
        assert isinstance(module, nn.Linear)
        rank = _of_pattern(config, "rank_pattern", name, config.get("r"))
        alpha = _of_pattern(config, "alpha_pattern", name, config.get("lora_alpha"))
        if not isinstance(rank, int) or not 0 < rank <= MAX_RANK:
            raise ModelRefused(f"`r`: not from 1 to {MAX_RANK}")
        if not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
            raise ModelRefused(f"`lora_alpha`: no number up to {MAX_ALPHA:g}")
        shapes = {side: tuple(tensor.shape) for side, tensor in pair.items()}
        wanted = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
        if shapes != wanted:
            raise ModelRefused(f"`{name}`: {shapes} is not of this base model: {wanted}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        state.update(f"{name} {scale.hex()}\n".encode())
        for side, tensor in sorted(pair.items()):
            state.update(f"{side} {shapes[side]} {tensor.dtype}\n".encode())
            state.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        weight = module.weight
        a, b = (pair[side].to(device=weight.device, dtype=weight.dtype) for side in "AB")
        layers[name] = LowRank(a, b, scale)
        num_bytes += a.nbytes + b.nbytes
    return Adapter(
        digest=state.hexdigest(),
        rank=max(len(layer.a) for layer in layers.values()),
        num_bytes=num_bytes,
        invocation=invocation,
        layers=layers,
    )


class Adapters:
    """The adapters on the model, by digest. All but `read` is called from one thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._read: dict[str, Adapter] = {}
        self._held: dict[str, Adapter] = {}

    def read(self, directory: Path) -> Adapter:
        """Load an adapter, which `hold` puts on the model. Raise ModelRefused."""
        adapter = load_adapter(directory, self._model)
        self._read[adapter.digest] = adapter
        return adapter

    def hold(self, digest: str) -> None:
        self._held[digest] = self._read.pop(digest)

    def let_go(self, digest: str) -> None:
        self._held.pop(digest, None)

    @contextmanager
    def acting(self, works: Sequence[Work], device: torch.device) -> Iterator[None]:
        """Within, a forward of these works' tokens, in their order, has the adapters' part."""
        rows: dict[str, list[int]] = {}
        end = 0
        for work in works:
            begin, end = end, end + len(work.token_ids)
            if (use := work.adapter) is not None:
                acting = range(max(begin, begin + use.start - work.start), end)
                rows.setdefault(use.digest, []).extend(acting)
        added: dict[str, list[tuple[LowRank, torch.Tensor]]] = {}
        for digest, own in rows.items():
            if own:
                index = torch.tensor(own, device=device)
                for name, layer in self._held[digest].layers.items():
                    added.setdefault(name, []).append((layer, index))
        hooks = [
            self._modules[name].register_forward_hook(partial(_add, parts, end))
            for name, parts in added.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _add(
    parts: Sequence[tuple[LowRank, torch.Tensor]],
    num_rows: int,
    _module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    given = inputs[0].reshape(-1, inputs[0].shape[-1])
    assert len(given) == num_rows, "the layer's rows are not the step's tokens"
    flat = output.reshape(num_rows, -1)
    for (a, b, scale), rows in parts:
        flat.index_add_(0, rows, (given[rows] @ a.T @ b.T) * scale)
    return flat.view_as(output)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        with (directory / "adapter_config.json").open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except OSError as error:
        raise ModelRefused(f"adapter_config.json: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise ModelRefused("adapter_config.json: not valid JSON") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelRefused("`peft_type`: not LORA")
    other = sorted(
        name for name, value in config.items() if value and name not in _NO_MATTER | _READ
    )
    if other:
        raise ModelRefused(f"`{other[0][:64]}`: not supported")
    if config.get("bias", "none") != "none":
        raise ModelRefused("`bias`: not supported")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise ModelRefused("`init_lora_weights`: changes the base model's weights")
    return config


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelRefused(f"{path.name}: {size} bytes, and {MAX_BYTES} are the most")
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except OSError as error:
        raise ModelRefused(f"{path.name}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ModelRefused(f"{path.name}: damaged: {error}") from error


def _check_module(modules: Mapping[str, nn.Module], name: str, model: PreTrainedModel) -> None:
    """Raise ModelRefused for a layer whose rows are not a step's tokens, or that is not there."""
    module, parent = modules.get(name), modules.get(name.rpartition(".")[0])
    head: object = model.get_submodule("lm_head") if "lm_head" in modules else None
    if module is head or isinstance(module, nn.Embedding):
        raise ModelRefused(f"`{name}`: adapters of embeddings and of the head are not supported")
    if ".experts." in f"{name}.":
        raise ModelRefused(f"`{name}`: adapters of experts are not supported")
    if parent is not None and any(isinstance(child, nn.Conv1d) for child in parent.children()):
        raise ModelRefused(f"`{name}`: adapters of recurrent layers are not supported")
    if module is not None and name.endswith(".kv_b_proj"):
        raise ModelRefused(f"`{name}`: adapters of what latents go through are not supported")
    if type(module) is not nn.Linear:
        raise ModelRefused(f"`{name[:128]}`: the base model has no such linear layer")


def _of_pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """The value of the first pattern that fits a module's name, as PEFT finds it."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise ModelRefused(f"`{field}`: no object")
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error:
            raise ModelRefused(f"`{field}`: not a regular expression: {pattern[:64]}") from None
    return default
