"""LoRA adapters: reads PEFT's directories, and adds the adapters' parts to the rows of a step.

An adapter adds `scale · B(A x)` to the output of linear layers (Hu et al. 2021). An activated
adapter acts only from the last occurrence of its invocation in the prompt on (Greenewald et al.
2025). So the keys and values before that place are the base model's. The model has hooks only
during steps that compute rows of an adapter. An adapter that can't be computed exactly is refused.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn
from transformers import PreTrainedModel

from engine.compute.errors import ModelRefused
from engine.peft import WEIGHTS, AdapterFiles, read_files
from engine.schedule.runner import Work

_WEIGHT = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class LowRank(NamedTuple):
    """The part that an adapter adds at one linear layer."""

    # (rank, inputs).
    a: torch.Tensor
    # (outputs, rank).
    b: torch.Tensor
    # The factor of the added part.
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank weights that are added to the weights of some layers."""

    # The digest of the adapter's files.
    digest: str
    # The largest rank of any layer.
    rank: int
    # The memory that the matrices take.
    num_bytes: int
    # The adapter acts from the last occurrence of these tokens in the prompt on. Empty: it acts on
    # the whole prompt.
    invocation: Sequence[int]
    # By the name of the module.
    layers: Mapping[str, LowRank]


def _read_sides(
    files: AdapterFiles, modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, torch.Tensor]]:
    """The two matrices of each layer, by the layer's name and then by side, "A" or "B".

    Raises ModelRefused for damaged files and for layers that are not supported.
    """
    head = modules.get("lm_head")
    sides: dict[str, dict[str, torch.Tensor]] = {}
    try:
        tensors = load(files.weights)
    except SafetensorError as error:
        raise ModelRefused(f"{WEIGHTS}: damaged: {error}") from error
    for name, tensor in tensors.items():
        weight_name = _WEIGHT.fullmatch(name)
        if weight_name is None:
            raise ModelRefused(f"`{name[:128]}`: no weight of LoRA's")
        name = weight_name["module"]
        module = modules.get(name)
        parent = modules.get(name.rpartition(".")[0])
        is_embedding = module is not None and (module is head or isinstance(module, nn.Embedding))
        siblings = parent.children() if parent is not None else ()
        unsupported = {
            "embeddings and of the head": is_embedding,
            "experts": ".experts." in f"{name}.",
            "recurrent layers": any(isinstance(child, nn.Conv1d) for child in siblings),
            "what latents go through": module is not None and name.endswith(".kv_b_proj"),
        }
        for kind, is_kind in unsupported.items():
            if is_kind:
                raise ModelRefused(f"`{name}`: adapters of {kind} are not supported")
        if type(module) is not nn.Linear:
            raise ModelRefused(f"`{name[:128]}`: the base model has no such linear layer")
        sides.setdefault(name, {})[weight_name["side"]] = tensor
    return sides


def load_adapter(directory: Path, model: PreTrainedModel) -> Adapter:
    """Read and check a PEFT directory. Raise StartRefused, whose message names the obstacle."""
    files = read_files(directory)
    config = files.config
    invocation = files.invocation
    if any(not 0 <= token < model.config.vocab_size for token in invocation):
        raise ModelRefused("`alora_invocation_tokens`: an id that the model does not have")
    modules = dict(model.named_modules())
    sides = _read_sides(files, modules)
    if not sides:
        raise ModelRefused(f"{WEIGHTS}: no weights")
    ranks = files.ranks(list(sides))
    alphas = files.alphas(list(sides))
    layers = dict[str, LowRank]()
    num_bytes = 0
    for name, pair in sides.items():
        module = modules[name]
        assert isinstance(module, nn.Linear)
        rank = ranks[name]
        shapes = {side: tuple(tensor.shape) for side, tensor in pair.items()}
        expected_shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
        if shapes != expected_shapes:
            raise ModelRefused(f"`{name}`: {shapes} is not of this base model: {expected_shapes}")
        weight = module.weight
        a, b = (pair[side].to(device=weight.device, dtype=weight.dtype) for side in "AB")
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        layers[name] = LowRank(a, b, alphas[name] / divisor)
        num_bytes += a.nbytes + b.nbytes
    return Adapter(
        digest=files.digest,
        rank=max(len(layer.a) for layer in layers.values()),
        num_bytes=num_bytes,
        invocation=invocation,
        layers=layers,
    )


class Adapters:
    """The adapters of a model, by digest. All methods except `read` are called from one thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._unattached: dict[str, Adapter] = {}
        self._attached: dict[str, Adapter] = {}

    def read(self, directory: Path) -> Adapter:
        """Load an adapter, which `attach` puts on the model. Raise ModelRefused."""
        adapter = load_adapter(directory, self._model)
        # An earlier adapter that nobody attached is dropped.
        self._unattached = {adapter.digest: adapter}
        return adapter

    def attach(self, digest: str) -> None:
        self._attached[digest] = self._unattached.pop(digest)

    def detach(self, digest: str) -> None:
        self._attached.pop(digest, None)

    @contextmanager
    def acting(self, works: Sequence[Work], device: torch.device) -> Iterator[None]:
        """Inside this context a forward adds the adapters' parts to the rows of these works.

        The forward must compute the works' tokens in the works' order.
        """
        rows: dict[str, list[int]] = {}
        end = 0
        for work in works:
            begin = end
            end = end + len(work.token_ids)
            use = work.adapter
            if use is not None:
                acted_on = range(max(begin, begin + use.start - work.start), end)
                rows.setdefault(use.digest, []).extend(acted_on)
        parts_of: dict[str, list[tuple[LowRank, torch.Tensor]]] = {}
        for digest, row_indexes in rows.items():
            if row_indexes:
                index = torch.tensor(row_indexes, device=device)
                for name, layer in self._attached[digest].layers.items():
                    parts_of.setdefault(name, []).append((layer, index))

        def add(
            parts: Sequence[tuple[LowRank, torch.Tensor]],
            _module: nn.Module,
            inputs: tuple[torch.Tensor, ...],
            output: torch.Tensor,
        ) -> torch.Tensor:
            flat_inputs = inputs[0].reshape(-1, inputs[0].shape[-1])
            assert len(flat_inputs) == end, "the layer's rows are not the step's tokens"
            flat = output.reshape(end, -1)
            for (a, b, scale), index in parts:
                flat.index_add_(0, index, (flat_inputs[index] @ a.T @ b.T) * scale)
            return flat.view_as(output)

        hooks = [
            self._modules[name].register_forward_hook(partial(add, parts))
            for name, parts in parts_of.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
