"""Loads a model from a Hugging Face directory or hub id, and checks that our attention is exact.

Safetensors only, no remote code. A model is served only if paged attention is exact for it. Its
configuration is checked first. Then a short prompt is computed both ways and compared.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from inspect import signature
from itertools import pairwise
from pathlib import Path
from sys import byteorder
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from engine.cache.ids import BlockId
from engine.cache.recurrent import StateMove
from engine.compute.attention.cpu_kernel import CpuKernel
from engine.compute.attention.step import (
    ATTENTION_NAME,
    STEP_ARGUMENT,
    AttentionProbe,
    paged_attention,
)
from engine.compute.attention.tiles import split_tokens
from engine.compute.compiler import NotCompiled
from engine.compute.errors import ModelRefused
from engine.compute.graphs.plan import GraphPlan, planned_bytes
from engine.compute.graphs.rule import GraphSizes
from engine.compute.kv import HostKv, KvDtype, KvLayout, KvPool, new_codec
from engine.compute.linear import state_parts, wrap_linear_layers
from engine.compute.runner import Kernel, TorchRunner
from engine.schedule.runner import SampleParams, Work
from engine.sizing import STATES, NotSizable

Attention = Literal["auto", "sdpa", "cpp", "triton"]
"""What computes attention. `sdpa` is torch's own functions. `cpp` and `triton` are paged kernels,
for a CPU and for a GPU. `auto` takes a kernel where there is one."""
Progress = Callable[[str, float], None]
"""Takes a stage's name and the fraction of the load that is done, 0 to 1."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHECK_TOKENS = 24
"""The tokens of the prompt that is computed for the check at the load."""
_CHECK_CUTS = (0, 13, 23, 24)
"""Where that prompt is cut. The last token is a decode step of its own, because kernels compute
such a step in another way than a chunk."""
_CHECK_BLOCK = 8
"""The slots of a block in the check."""
# The largest difference to the plain forward, as a share of the largest logit. A wrong attention is
# off by a tenth or more. Rounding is off by a few units in the last place, which the layers
# amplify.
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checked model in evaluation mode."""

    model: PreTrainedModel
    layout: KvLayout
    # For each layer the number of tokens that it attends to; None: all.
    windows: list[int | None]
    # The length that the model was trained for.
    max_context_tokens: int
    device: torch.device
    # None: torch's functions attend.
    kernel: Kernel | None = None
    # Why there is no kernel; None: there is one, or none was wanted.
    why_no_kernel: str | None = None

    @property
    def attention(self) -> str:
        """The name of the kernel, with the processor's level; `sdpa` for torch's functions."""
        return "sdpa" if self.kernel is None else self.kernel.name

    @property
    def device_name(self) -> str:
        is_cuda = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if is_cuda else self.device.type

    def free_bytes(self) -> int:
        """The device's free memory now."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def runner(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        graphs: GraphPlan | None = None,
    ) -> TorchRunner:
        """Allocate the device's pool and the host's pool. The cache decides about their blocks.

        With `graphs`, decode steps are captured. Raises ModelRefused where they can't be.
        """
        sizes = None if graphs is None else self._graph_sizes(graphs, block_size)
        pool = KvPool(
            self.layout, num_blocks, block_size, self.device, has_scratch=graphs is not None
        )
        host = HostKv(pool, host_blocks)
        runner = TorchRunner(self.model, pool, self.windows, host, self.kernel)
        if graphs is not None and sizes is not None:
            runner.capture_decodes(sizes, graphs.capture)
        return runner

    def graph_bytes(self, graphs: GraphPlan, block_size: int) -> int:
        """The bytes of the device's memory that are reserved for decode graphs.

        Raises ModelRefused where decode steps can't be captured.
        """
        sizes = self._graph_sizes(graphs, block_size)
        return planned_bytes(sizes, self.model.config, self.layout, block_size)

    def _graph_sizes(self, graphs: GraphPlan, block_size: int) -> GraphSizes:
        if self.layout.state_parts:
            raise ModelRefused("ENGINE_CUDA_GRAPHS: a recurrent state is not in static memory")
        if self.kernel is None:
            why = self.why_no_kernel or "torch's own functions attend"
            raise ModelRefused(f"ENGINE_CUDA_GRAPHS: needs a paged kernel: {why}")
        return GraphSizes(graphs.most_rows, self.max_context_tokens, split_tokens(block_size))


def _read_weights(model: str, dtype: str, report: Progress) -> PreTrainedModel:
    """The text decoder of a model, as transformers loads it. Raises ModelRefused."""
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        check_config(config)
        if Path(model).is_dir() and not any(Path(model).glob("*.safetensors")):
            raise ModelRefused(f"`model`: {model} has no safetensors files")
        report("weights", 0.1)
        is_text = config.get_text_config(decoder=True) is config
        auto: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        whole, report_of_load = auto.from_pretrained(
            model,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        # The lines after the first are advice about the library's own functions.
        why = str(error).strip().partition("\n")[0]
        raise ModelRefused(f"`model`: {model} can't be loaded: {why}") from error
    except SafetensorError as error:
        raise ModelRefused(
            f"`model`: {model} has a damaged safetensors file, perhaps a download that was cut off:"
            f" {error}"
        ) from error
    missing = sorted(report_of_load["missing_keys"])
    if missing:
        # The library would fill them at random.
        raise ModelRefused(
            f"`model`: {model} has no weights for {missing[0]} ({len(missing)} missing in all)"
        )
    return whole if is_text else _text_decoder(whole)


def load_model(
    model: str,
    *,
    dtype: str | None = None,
    attention: Attention = "auto",
    kv_dtype: KvDtype = "model",
    device: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load, check and return a model, on `device` or on a GPU where there is one.

    `dtype` None means float32 on a CPU and bfloat16 on a GPU. On a CPU torch has as many threads as
    `OMP_NUM_THREADS` says. Raises ModelRefused with the reason.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    report = progress or (lambda _stage, _fraction: None)
    report("configuration", 0.0)
    if dtype not in DTYPES:
        raise ModelRefused(f"`dtype`: {dtype} is none of {sorted(DTYPES)}")
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    # The hub would be asked for a path that does not exist. Its error would speak of names.
    if model.startswith(("/", ".", "~")) and not Path(model).exists():
        raise ModelRefused(f"`model`: there is no directory {model}")
    loaded = _read_weights(model, dtype, report)
    torch.nn.Module.to(loaded, torch.device(device))
    report("check", 0.8)
    prepared = prepare_model(loaded, attention, kv_dtype)
    report("ready", 1.0)
    return prepared


def _text_decoder(whole: Any) -> PreTrainedModel:
    """The text decoder inside a model that also sees or hears. The rest of the model is dropped.

    Raises ModelRefused if transformers has no class for the decoder alone.
    """
    inner = whole.get_decoder()
    auto: Any = AutoModelForCausalLM
    decoder: Any = None
    with suppress(ValueError), torch.device("meta"):
        decoder = auto.from_config(whole.config.get_text_config(decoder=True))
    if decoder is None or type(decoder.base_model) is not type(inner):
        raise ModelRefused(f"{type(whole).__name__} has no text decoder that stands alone")
    setattr(decoder, decoder.base_model_prefix, inner)
    decoder.set_output_embeddings(whole.get_output_embeddings())
    text_model: PreTrainedModel = decoder
    return text_model


def prepare_model(
    model: PreTrainedModel, attention: Attention = "auto", kv_dtype: KvDtype = "model"
) -> LoadedModel:
    """Check a model that is already in memory, and switch it to our attention.

    The check keeps keys and values in the model's own type, because `kv_dtype` is not meant to be
    exact. A paged kernel reads only the model's own type. With any other type torch's functions
    attend. Raises ModelRefused.
    """
    if kv_dtype != "model":
        if attention in ("triton", "cpp"):
            raise ModelRefused(f"`attention`: the kernel `{attention}` reads no other `kv_dtype`")
        attention = "sdpa"
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    check_config(model.config)
    is_able = getattr(type(model), "_supports_attention_backend", False)
    if not is_able and not has_state(model.config):
        raise ModelRefused(f"{type(model).__name__} does not support attention backends")
    if "logits_to_keep" not in signature(model.forward).parameters:
        raise ModelRefused(f"{type(model).__name__} can't compute selected logits")
    parameter = next(model.parameters())
    model.train(mode=False)
    model.requires_grad_(requires_grad=False)
    lay_out(model)
    model.set_attn_implementation(ATTENTION_NAME)
    layout = kv_layout(model)
    wrap_linear_layers(model, layout.state_parts)
    num_heads = model.config.num_attention_heads
    max_context_tokens = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(max_context_tokens, int):
        raise ModelRefused("the configuration does not say how long the context is")
    kernel, why_no_kernel = _paged_kernel(attention, num_heads, layout, parameter.device)
    prepared = LoadedModel(
        model=model,
        layout=layout,
        windows=layer_windows(model.config),
        max_context_tokens=max_context_tokens,
        device=parameter.device,
        kernel=kernel,
        why_no_kernel=why_no_kernel,
    )
    check_exactness(prepared)
    layout = replace(layout, kv_dtype=kv_dtype)
    try:
        new_codec(kv_dtype, layout.head_dim)
    except NotSizable as error:
        raise ModelRefused(f"`kv_dtype`: {error}") from error
    return replace(prepared, layout=layout)


def check_exactness(loaded: LoadedModel) -> None:
    """Compare a short prompt's logits with those of the model's own attention.

    The prompt is computed in two chunks and a decode step, over scattered blocks. It can't show a
    sliding window that is longer than itself. So each layer's call compares its window with the
    configuration.

    Raises ModelRefused if the logits differ by more than rounding, or if the attention of any layer
    does not run exactly once.
    """
    config = loaded.model.config
    stride = max(1, config.vocab_size // (2 * _CHECK_TOKENS))
    token_ids = [(7 + stride * i) % config.vocab_size for i in range(_CHECK_TOKENS)]
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = loaded.model(torch.tensor([token_ids], device=loaded.device), use_cache=False)
    expected = plain.logits[0, -1].float()
    loaded.model.set_attn_implementation(ATTENTION_NAME)
    if loaded.model.config._attn_implementation != ATTENTION_NAME:
        raise ModelRefused(f"{type(loaded.model).__name__} keeps its own attention")
    table = [BlockId(block) for block in (4, 1, 3)]
    params = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
    num_blocks = 5 + 2 * loaded.layout.state_blocks(_CHECK_BLOCK)
    runner = loaded.runner(num_blocks, block_size=_CHECK_BLOCK)
    num_state = loaded.layout.state_blocks(_CHECK_BLOCK)
    places = [[BlockId(5 + num_state * turn + i) for i in range(num_state)] for turn in (0, 1)]
    for turn, (start, end) in enumerate(pairwise(_CHECK_CUTS)):
        source = places[1 - turn % 2]
        target = places[turn % 2]
        work = Work(
            token_ids=token_ids[start:end],
            start=start,
            block_table=table,
            sample=params,
            state=StateMove(source if start else None, target) if num_state else None,
        )
        logits, visited = runner.visit([work])
        if visited != list(loaded.layout.place_of):
            raise ModelRefused(f"layers without attention of ours: {len(visited)} came by")
    difference = float((logits[0].float() - expected).abs().max() / expected.abs().max())
    if not difference <= _CHECK_TOLERANCE[loaded.layout.dtype]:
        raise ModelRefused(f"paged attention is not exact for this model: off by {difference:.1e}")


def _paged_kernel(
    attention: Attention, num_heads: int, layout: KvLayout, device: torch.device
) -> tuple[Kernel | None, str | None]:
    """A kernel, or the reason why `auto` has none.

    Raises ModelRefused if a kernel was asked for by name and there is none.
    """
    if attention == "sdpa":
        return None, None
    why = ""
    try:
        if attention == "triton" or (attention == "auto" and device.type == "cuda"):
            if find_spec("triton") is not None:
                from engine.compute.attention.kernel import tried_kernel

                return tried_kernel(layout, num_heads, device), None
            why = "triton is not installed"
        elif device.type == "cpu":
            return CpuKernel(layout, num_heads), None
        else:
            why = f"the kernel in C++ does not run on {device.type}"
    except NotCompiled as error:
        why = str(error)
    if attention == "auto":
        return None, why
    raise ModelRefused(f"`attention`: {why}")


def lay_out(model: nn.Module) -> None:
    """Store the weight of each linear layer input by input. Shapes and `state_dict` do not change.

    A product of a few rows and such a weight takes a half to two thirds of the time, because MKL
    need not transpose the weight first. A weight that an embedding shares stays as it is, because
    the embedding looks up its rows.
    """
    embedded = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        # Subclasses may compute with their weight in other ways.
        if type(module) is not nn.Linear or module.weight.data_ptr() in embedded:
            continue
        if module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.weight.data = module.weight.data.t().contiguous().t()


_PART_BYTES = 64 * 2**20
"""The bytes of weights that are hashed at a time."""


def model_facts(loaded: LoadedModel, block_size: int) -> dict[str, str]:
    """The facts that a model's fingerprint is made of.

    All weights are read, which takes about a second for each GB.
    """
    state = blake2b(digest_size=32)
    for name, tensor in sorted(loaded.model.state_dict().items()):
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(flat), _PART_BYTES):
            state.update(flat[start : start + _PART_BYTES].cpu().numpy())
    layout = loaded.layout
    config = copy(loaded.model.config)
    config.name_or_path = ""  # the folder of a model does not change it
    state_facts = {"state": str(list(layout.state_parts))} if layout.state_parts else {}
    return {
        **state_facts,
        "weights": state.hexdigest(),
        "class": type(loaded.model).__name__,
        "config": config.to_json_string(use_diff=False),
        "layout": f"{layout.num_planes} {layout.num_kv_heads} {layout.head_dim} {block_size}",
        "dtype": str(layout.dtype),
        "kv dtype": layout.kv_dtype,
        "windows": str(loaded.windows),
        "torch": torch.__version__,
        "device": loaded.device.type,
        # Torch's functions and the kernels differ in the last bits. A prefix should be continued by
        # what computed its beginning.
        "attention": "torch" if loaded.kernel is None else type(loaded.kernel).__name__,
        "byte order": byteorder,
    }


_LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies depend on the longest sequence in the forward. A cached key
would be right for one length only, and sequences in a batch would influence each other."""
# Configuration attributes. The text says what a model has if the attribute is set to anything true.
_UNSUPPORTED_ATTRIBUTES = {
    "alibi": "ALiBi position bias",
    "relative_attention_num_buckets": "relative position bias",
    "use_bidirectional_attention": "bidirectional attention",
    "is_encoder_decoder": "an encoder",
    "attention_chunk_size": "chunked attention",
}
_LINEAR_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
_ATTENDING_TYPES = frozenset({"full_attention", "sliding_attention", "hybrid"})
_LAYER_TYPES = frozenset({"mlp", "moe"}) | _ATTENDING_TYPES | _LINEAR_TYPES


def check_config(config: PretrainedConfig) -> None:
    """Raise ModelRefused, with the reason, if paged attention can't be exact for this model.

    If a model has more than a text decoder, only the decoder's configuration is checked.
    """
    config = config.get_text_config(decoder=True)
    name = getattr(config, "model_type", "unknown")
    unsupported = _UNSUPPORTED_ATTRIBUTES | ({} if has_state(config) else STATES)
    for attribute, meaning in unsupported.items():
        if getattr(config, attribute, None):
            raise ModelRefused(f"`{name}` models have {meaning}: not supported")
    needed = ("vocab_size", "num_hidden_layers", "num_attention_heads")
    if not all(isinstance(getattr(config, attribute, None), int) for attribute in needed):
        raise ModelRefused(f"`{name}` models are no text decoders")
    indexing = [attribute for attribute in vars(config) if attribute.startswith("index_")]
    sparse = sorted(attribute for attribute in indexing if getattr(config, attribute))
    if sparse:
        # The check's short prompt can't show which keys a long prompt leaves out.
        raise ModelRefused(f"`{name}` models pick the keys that they attend to: {sparse[0]}")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types <= _LAYER_TYPES:
        unknown = sorted(layer_types - _LAYER_TYPES)
        raise ModelRefused(f"`{name}` models have layers of other kinds: {unknown}")
    # The parameters are one set for all layers, or one set for each layer type.
    ropes = getattr(config, "rope_parameters", None)
    sets = [ropes, *ropes.values()] if isinstance(ropes, dict) else []
    for parameters in sets:
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if isinstance(kind, str) and kind in _LENGTH_DEPENDENT_ROPES:
            raise ModelRefused(f"rotary embedding that depends on the length: {kind}")


def has_state(config: PretrainedConfig) -> bool:
    """Whether the model has linear layers beside attention, which keep a state of each sequence."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return not kinds.isdisjoint(_LINEAR_TYPES) and not kinds.isdisjoint(_ATTENDING_TYPES)


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Each layer's sliding window in tokens; None for a layer that attends to all tokens."""
    num_layers = config.num_hidden_layers
    layers = getattr(config, "per_layer_config", None) or [config] * num_layers
    windows = [getattr(layers[index], "sliding_window", None) for index in range(num_layers)]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    return [
        window if kind == "sliding_attention" else None
        for kind, window in zip(kinds, windows, strict=False)
    ]


def kv_layout(model: PreTrainedModel) -> KvLayout:
    """The shape of a token's keys and values, and the parts of a state. A forward shows both.

    Raises ModelRefused for a model whose layers do not fit into one pool.
    """
    config = model.config
    parameter = next(model.parameters())
    rank: int | None = getattr(config, "kv_lora_rank", None) or None
    probe = AttentionProbe()
    cache = DynamicCache(config=config) if has_state(config) else None
    ids = torch.zeros((1, 2), dtype=torch.long, device=parameter.device)
    with torch.inference_mode():
        model(
            ids,
            position_ids=torch.arange(2)[None].to(ids),
            past_key_values=cache,
            use_cache=cache is not None,
            **{STEP_ARGUMENT: probe},
        )
    if not probe.layers:
        raise ModelRefused(f"{type(model).__name__} keeps its own attention")
    # Layers with keys and values of their own.
    layers = [layer for layer in probe.layers if layer.source == layer.layer]
    if rank is not None:
        width = rank + config.qk_rope_head_dim
        layers = [replace(layer, kv_heads=1, width=width) for layer in layers]
    places = {layer.layer: place for place, layer in enumerate(layers)}
    num_kv_heads = max(layer.kv_heads for layer in layers)
    unfit = [layer.layer for layer in layers if num_kv_heads % layer.kv_heads]
    if unfit:
        raise ModelRefused(f"layer {unfit[0]} has no part of the largest layer's KV heads")
    return KvLayout(
        num_layers=len(layers),
        num_kv_heads=num_kv_heads,
        head_dim=max(layer.width for layer in layers),
        dtype=parameter.dtype,
        latent_rank=rank,
        places={layer.layer: places[layer.source] for layer in probe.layers},
        state_parts=state_parts(cache) if cache is not None else (),
    )
