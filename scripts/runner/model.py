"""A `--model` that can't be loaded is told in one line before anything is installed or started.

A directory is looked at. What only the hub or a loaded model shows, the engine says itself.
"""

import json
import re
from pathlib import Path

from scripts.runner.options import UsageError

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SUFFIX = ".safetensors"
OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth")


def check_model(model: str, engine: str) -> None:
    """Raises UsageError with what is wrong and what to do. vLLM reads more kinds of weights."""
    path = Path(model)
    if path.is_file() and engine == "native":
        raise UsageError(
            f"`--model {model}` is a file; name the directory with config.json and *{SUFFIX}"
        )
    if path.is_absolute() and not path.exists():
        raise UsageError(f"`--model {model}`: there is no such directory")
    if not path.exists() and not HUB_ID.fullmatch(model):
        raise UsageError(f"`--model {model}` is neither a directory here nor a hub id (owner/name)")
    if path.is_dir():
        _check_config(path / "config.json")
        if engine == "native":
            _check_weights(path)


def _check_config(config: Path) -> None:
    if not config.is_file():
        raise UsageError(
            f"`--model {config.parent}` has no config.json; name a Hugging Face model's folder"
        )
    try:
        read = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"`--model`: {config} is broken ({error}); download it again") from error
    if not isinstance(read, dict) or not isinstance(read.get("model_type"), str):
        raise UsageError(f"`--model`: {config} names no model_type; it is no model's configuration")


def _check_weights(path: Path) -> None:
    """Raises UsageError where there are no weights, or fewer than their index names."""
    found = {file.name for file in path.glob(f"*{SUFFIX}")}
    if not found:
        others = [file.name for pattern in OTHER_WEIGHTS for file in sorted(path.glob(pattern))]
        only = f", only {', '.join(others[:3])}" if others else ""
        raise UsageError(
            f"`--model {path}` has no weights (*{SUFFIX}){only}; "
            "download them, or convert them with transformers' save_pretrained"
        )
    index = path / f"model{SUFFIX}.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"`--model`: {index} is broken; download it again") from error
    if missing := sorted(named - found):
        raise UsageError(
            f"`--model {path}` lacks {len(missing)} of {len(named)} files of weights, "
            f"such as {missing[0]}; download them"
        )
