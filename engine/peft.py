"""LoRA adapters as PEFT writes them: a folder's two files, read once and known by their content."""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.patterns import PatternRefused, matching
from engine.refusal import StartRefused

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 512
MAX_ALPHA = 1e6
MAX_BYTES = 2 * 2**30
"""The most bytes of one adapter's weights."""
MAX_CONFIG_BYTES = 2**20
MAX_INVOCATION = 256
"""The most tokens of an invocation."""

# The fields of adapter_config.json that change nothing of what a loaded adapter computes, and the
# fields that decide it. Any other field may change it, and is refused if it is set.
_NO_MATTER = frozenset(
    """task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    target_modules exclude_modules lora_dropout layers_to_transform layers_pattern megatron_core
    loftq_config eva_config qalora_group_size ensure_weight_tying peft_type bias
    init_lora_weights""".split()
)
_MATTER = frozenset(
    "r lora_alpha use_rslora rank_pattern alpha_pattern alora_invocation_tokens".split()
)
# Other ways to begin change the base model's own weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter, as it was read from its folder."""

    config: dict[str, Any]
    # The safetensors file. Its tensors are not checked here.
    weights: bytes
    # The SHA-256, in hex, of the weights and of the config's fields that decide what is computed.
    digest: str

    @property
    def invocation(self) -> Sequence[int]:
        tokens: list[int] = self.config.get("alora_invocation_tokens") or []
        return tokens

    @property
    def max_rank(self) -> int:
        patterns: dict[str, int] = self.config.get("rank_pattern") or {}
        ranks: list[int] = [self.config["r"], *patterns.values()]
        return max(ranks)

    def ranks(self, modules: Sequence[str]) -> Mapping[str, int]:
        """The rank of each module, by `rank_pattern` as PEFT finds it. Raise StartRefused.

        Waits for the process that matches; so does `alphas`.
        """
        return self._values("rank_pattern", modules, self.config["r"])

    def alphas(self, modules: Sequence[str]) -> Mapping[str, float]:
        """The alpha of each module, by `alpha_pattern`. Raise StartRefused."""
        return self._values("alpha_pattern", modules, self.config["lora_alpha"])

    def _values(self, field: str, modules: Sequence[str], default: Any) -> Mapping[str, Any]:
        patterns: dict[str, Any] = self.config.get(field) or {}
        matches = _matching(field, patterns, modules)
        return {name: patterns[matches[name]] if name in matches else default for name in modules}

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(json.dumps(self.config), encoding="utf-8")
        (directory / WEIGHTS).write_bytes(self.weights)


def read_files(directory: Path) -> AdapterFiles:
    """Raise StartRefused, which names the field or file and what is wrong with it."""
    config = _read_config(directory / CONFIG)
    weights = _read(directory / WEIGHTS, MAX_BYTES)
    decisive = {name: config[name] for name in sorted(_MATTER) if config.get(name)}
    state = sha256(json.dumps(decisive, sort_keys=True).encode())
    state.update(weights)
    return AdapterFiles(config, weights, state.hexdigest())


def _read(path: Path, max_bytes: int) -> bytes:
    """A file's content. Raise StartRefused for a larger file, and for a pipe or a device.

    A pipe or a device may have no end, or somebody else decides on its end.
    """
    try:
        with open(path, "rb", opener=_opened) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise StartRefused(f"{path.name}: not a regular file")
            if status.st_size > max_bytes:
                raise StartRefused(
                    f"{path.name}: {status.st_size} bytes, and {max_bytes} are the most"
                )
            return file.read(max_bytes)
    except OSError as error:
        raise StartRefused(f"{path.name}: {error.strerror or error}") from error


def _opened(path: str, flags: int) -> int:
    """Opens a file. A pipe is opened without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        raise StartRefused(f"{CONFIG}: not valid JSON") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise StartRefused("`peft_type`: not LORA")
    other = sorted(
        name for name, value in config.items() if value and name not in _NO_MATTER | _MATTER
    )
    if other:
        raise StartRefused(f"`{other[0][:64]}`: not supported")
    if config.get("bias", "none") != "none":
        raise StartRefused("`bias`: not supported")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise StartRefused("`init_lora_weights`: changes the base model's weights")
    for rank in (config.get("r"), *_patterns(config, "rank_pattern").values()):
        if type(rank) is not int or not 0 < rank <= MAX_RANK:
            raise StartRefused(f"`r`: not from 1 to {MAX_RANK}")
    for alpha in (config.get("lora_alpha"), *_patterns(config, "alpha_pattern").values()):
        if not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
            raise StartRefused(f"`lora_alpha`: no number up to {MAX_ALPHA:g}")
    invocation = config.get("alora_invocation_tokens") or []
    are_tokens = isinstance(invocation, list) and all(
        type(token_id) is int for token_id in invocation
    )
    if not are_tokens or len(invocation) > MAX_INVOCATION:
        raise StartRefused(f"`alora_invocation_tokens`: not a list of {MAX_INVOCATION} ids or less")
    return config


def _patterns(config: dict[str, Any], field: str) -> dict[str, Any]:
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise StartRefused(f"`{field}`: no object")
    _matching(field, patterns, ())
    return patterns


def _matching(field: str, patterns: dict[str, Any], modules: Sequence[str]) -> Mapping[str, str]:
    try:
        return matching(list(patterns), modules)
    except PatternRefused as error:
        raise StartRefused(f"`{field}`: {error}") from None
