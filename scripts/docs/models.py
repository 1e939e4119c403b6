"""Which architectures the engines serve: engine/MODELS.md, by trying each.

    python -m scripts.docs.models > engine/MODELS.md
    VLLM_PYTHON=.venv-vllm/bin/python python -m scripts.docs.models > engine/MODELS.md

Each model is tiny, with random weights. The native engine checks it as at every start: it compares
its logits, through our paged attention and chunk by chunk, with transformers' own forward. vLLM
loads it with our connector, which leases an entry at a mark and must read all of it behind another
prompt. This takes a minute, and ten more with vLLM.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as version

from engine.compute.errors import ModelRefused
from engine.compute.loading import Attention, prepare_model
from scripts.stack import ROOT

_HEAD = """# Models

`python -m scripts.docs.models` makes this page with tiny random models in float32, one of each
architecture. It was made with transformers {version}. A checkpoint that
also sees or hears is served by its text decoder.

*Native engine*: the check of every start. *Latents* and *state*: what entries have besides keys and
values, or in their place ([models and hybrids](README.md#computation)). *On vLLM*: its CPU build
with the plugin's connector. "served" means that an entry was leased at a mark, and read behind
other prompts. Marks are at multiples of 32 unless the table has another number. For a model that is
refused the table has the beginning of the error.

| architectures | native engine | on vLLM |
|---|---|---|"""
_SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM's CPU attention takes
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 8,
}
_MIXED = ["linear_attention", "full_attention"] * 2
_CONVOLVED = ["conv", "full_attention"] * 2
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
# Heads of 128 are the only ones that vLLM's CPU kernels of such layers take.
_DELTA = {
    "layer_types": _MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_ALIKE = """
llama mistral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text
gemma4_text phi phi3 olmo2 olmo3 granite granitemoe cohere cohere2 starcoder2 gpt_oss glm glm4
glm4_moe ernie4_5 ernie4_5_moe minimax_m2 mimo_v2_flash smollm3 exaone4 gpt_neox apertus seed_oss
arcee bitnet stablelm falcon llama4_text
"""
_OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"q_lora_rank": 32},
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "kimi_linear": {"num_key_value_heads": 4, "layer_types": _MIXED, "num_experts_per_token": 2},
    "lfm2": {"layer_types": _CONVOLVED},
    "lfm2_moe": {"layer_types": _CONVOLVED, "num_dense_layers": 1},
    "minicpm3": _LATENT | {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "granitemoehybrid": _MAMBA | {"layer_types": _MIXED, "shared_intermediate_size": 64},
    "falcon_h1": _MAMBA | {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    "mamba": {"num_hidden_layers": 2},
}
_SETTINGS = {name: dict[str, Any]() for name in _ALIKE.split()} | _OTHERS
ARCHITECTURES = sorted(_SETTINGS)
_VLLM_BLOCKS = 384
_MAX_ERROR = 100
_ERROR = re.compile(
    r"^(?:\[rank0\]: )?[A-Za-z_.]+(?:Error|Exception|Refused): "
    r"(?:.* validation errors? for .*\n  )?(.+)$",
    re.MULTILINE,
)


def tiny_model(architecture: str) -> PreTrainedModel:
    """One of the `ARCHITECTURES` with random weights, float32, in evaluation mode."""
    kind = CONFIG_MAPPING[architecture]
    fields = kind().to_dict()
    small_fields = {name: value for name, value in _SMALL.items() if fields.get(name) is not None}
    torch.manual_seed(7)
    auto: Any = AutoModelForCausalLM
    config = kind(**small_fields | _SETTINGS[architecture])
    model: PreTrainedModel = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.nan_to_num_()  # what transformers leaves uninitialised
    model.train(mode=False)
    torch.nn.Module.float(model)
    return model


def natively(model: PreTrainedModel, attention: Attention) -> str:
    """How the native engine serves the model, or why it does not."""
    try:
        layout = prepare_model(model, attention).layout
    except ModelRefused as refusal:
        return f"refused: {refusal}"
    words = ["served"]
    if layout.latent_rank:
        words.append("latents")
    if layout.state_parts:
        words.append("state")
    return ", ".join(words)


def on_vllm(folders: Sequence[Path], python: str) -> Iterator[str]:
    """How vLLM serves each model, or why it does not, by a Python that has vLLM."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", "scripts.docs.models", *map(str, folders)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        for folder in folders:
            outcome_file = folder / "outcome"
            while not outcome_file.exists() and process.poll() is None:
                time.sleep(1)
            yield outcome_file.read_text("utf-8")


def try_each(folders: Sequence[Path]) -> None:
    """Try each model in a fork of this process: vLLM is imported once."""
    import vllm  # noqa: F401

    for folder in folders:
        child = os.fork()
        if child == 0:
            with (folder / "log").open("w") as log:
                os.dup2(log.fileno(), 2)
            (folder / "answer").write_text(try_inside(str(folder)), "utf-8")
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer_file = folder / "answer"
        if answer_file.exists():
            outcome = answer_file.read_text("utf-8")
        else:
            errors = _ERROR.findall((folder / "log").read_text("utf-8", "replace"))
            outcome = f"refused: {errors[-1][:_MAX_ERROR] if errors else f'ended with {status}'}"
        # Renamed when it is whole: another process waits for the file.
        (folder / "part").write_text(outcome, "utf-8")
        (folder / "part").rename(folder / "outcome")


def try_inside(folder: str) -> str:
    """Lease an entry in this process's vLLM, and read it behind another prompt."""
    from vllm import LLM, SamplingParams

    from engine.backends.vllm import directive
    from engine.backends.vllm.arguments import MODULE, NAME

    connector = {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"lease_share": 0.5},
    }

    vllm_model: Any = LLM
    engine = vllm_model(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",  # the only one that some of vLLM's CPU kernels take
        enforce_eager=True,
        block_size=32,
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=_VLLM_BLOCKS,
        kv_transfer_config=connector,
    )
    core = engine.llm_engine.engine_core.engine_core
    size = core.scheduler.block_size
    token = "token"
    core.holdfast_bind(token)
    prefix = [3 + 7 * place % 190 for place in range(2 * size)]

    def ask(name: str, prompt: list[int], wants: list[str], entry: str | None = None) -> Any:
        leases = [{"key": key, "tokens": len(prefix), "expires_at": 1.0} for key in wants]
        fields = {"request_id": name, "token": token, "scope": "s", "wants": leases, "read": entry}
        params = {"kv_transfer_params": {directive.PARAM_KEY: fields}}
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=params)
        return engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]

    ask("cold", [*prefix, *range(5, 40)], ["entry"])
    for number in range(_VLLM_BLOCKS * 32 // 1000 + 1):
        ask(f"other {number}", [4 + number, *(prefix * 16)[:999]], [])
    warm = ask("warm", [*prefix, *range(40, 90)], [], "entry")
    if warm.num_cached_tokens != len(prefix):
        return f"refused: {warm.num_cached_tokens} of {len(prefix)} tokens were read"
    return "served" if size == 32 else f"served, at multiples of {size}"


def rows_of(outcome_by_name: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """A row for each outcome, natively and on vLLM, with the architectures that have it."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for name, outcome in outcome_by_name.items():
        outcomes.setdefault(outcome, []).append(f"`{name}`")
    for (native, vllm), names in sorted(outcomes.items(), key=lambda item: -len(item[1])):
        yield f"| {', '.join(names)} | {native} | {vllm} |"


def main() -> int:
    if sys.argv[1:]:
        try_each([Path(folder) for folder in sys.argv[1:]])
        return 0
    python = os.environ.get("VLLM_PYTHON")
    outcome_by_name: dict[str, tuple[str, str]] = {}
    with TemporaryDirectory() as home:
        folders = [Path(home, name) for name in ARCHITECTURES]
        vllm: Iterable[str] = repeat("not tried")
        if python:
            for folder in folders:
                tiny_model(folder.name).save_pretrained(folder)
            vllm = on_vllm(folders, python)
        for name, vllm_outcome in zip(ARCHITECTURES, vllm, strict=False):
            outcome_by_name[name] = natively(tiny_model(name), "sdpa"), vllm_outcome
            print(name, *outcome_by_name[name], sep=": ", file=sys.stderr, flush=True)
    print(_HEAD.format(version=version), *rows_of(outcome_by_name), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
