"""A `--model` that can't be loaded is told in one line before anything is installed or started.

A directory is looked at, a hub id is asked of the hub. What only a loaded model shows (its
attention, its template) the engine says itself.
"""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from scripts.runner.options import UsageError

HUB = "https://huggingface.co"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
ASK_SECONDS = 10.0
MAX_HEADER_BYTES = 100 * 2**20
SUFFIX = ".safetensors"
OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth")
OFFLINE = "get it where there is a network (`hf download {model} --local-dir DIR`) and name DIR"


def check_model(model: str, engine: str, environ: Mapping[str, str]) -> None:
    """Raises UsageError with what is wrong and what to do. vLLM reads more kinds of weights."""
    path = Path(model)
    if path.is_dir():
        check_directory(path, needs_safetensors=engine == "native")
    elif path.is_file() and engine == "native":
        raise UsageError(
            f"`--model {model}` is a file; name the directory with config.json and *{SUFFIX}"
        )
    elif path.is_absolute() and not path.exists():
        raise UsageError(f"`--model {model}`: there is no such directory")
    elif not path.exists():
        check_hub_id(model, environ)


def check_directory(path: Path, *, needs_safetensors: bool) -> None:
    config = path / "config.json"
    if not config.is_file():
        raise UsageError(f"`--model {path}` has no config.json; name a Hugging Face model's folder")
    try:
        read = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"`--model`: {config} is broken ({error}); download it again") from error
    if not isinstance(read, dict) or not isinstance(read.get("model_type"), str):
        raise UsageError(f"`--model`: {config} names no model_type; it is no model's configuration")
    if needs_safetensors:
        check_weights(path)


def check_weights(path: Path) -> None:
    """Raises UsageError where there are no weights, or fewer than there must be."""
    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        others = [file.name for pattern in OTHER_WEIGHTS for file in sorted(path.glob(pattern))]
        only = f", only {', '.join(others[:3])}" if others else ""
        raise UsageError(
            f"`--model {path}` has no weights (*{SUFFIX}){only}; "
            "download them, or convert them with transformers' save_pretrained"
        )
    index = path / f"model{SUFFIX}.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"`--model`: {index} is broken; download it again") from error
        missing = sorted(named - {file.name for file in found})
        if missing:
            raise UsageError(
                f"`--model {path}` lacks {len(missing)} of {len(named)} files of weights, "
                f"such as {missing[0]}; download them"
            )
    for file in found:
        check_size(file)


def check_size(file: Path) -> None:
    """A download that broke off leaves a file shorter than its own header says."""
    wanted, size = safetensors_bytes(file), file.stat().st_size
    if wanted is None or size < wanted:
        known = f" ({size:,} of {wanted:,} bytes)" if wanted else ""
        raise UsageError(f"`--model`: {file} is incomplete{known}; download it again")


def safetensors_bytes(file: Path) -> int | None:
    """The bytes that a file of safetensors has by its header; None where that is broken."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            return None
        try:
            header = json.loads(opened.read(length))
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None
    return 8 + length + max(ends, default=0)


def check_hub_id(model: str, environ: Mapping[str, str]) -> None:
    """Raises UsageError where the hub has no such model for us, or can't be asked for it."""
    if not HUB_ID.fullmatch(model):
        raise UsageError(f"`--model {model}` is neither a directory here nor a hub id (owner/name)")
    if is_cached(model, environ):
        return
    offline = OFFLINE.format(model=model)
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise UsageError(f"`--model {model}` is not here, and HF_HUB_OFFLINE is set; {offline}")
    hub = environ.get("HF_ENDPOINT", HUB).rstrip("/")
    match ask_hub(f"{hub}/{model}/resolve/main/config.json", token_of(environ)):
        case 401 | 403:
            raise UsageError(
                f"`--model {model}`: {hub} shows it to nobody without permission, or has no such "
                "model; check the name, or set HF_TOKEN"
            )
        case 404:
            raise UsageError(f"`--model {model}`: {hub} has no such model; check the name")
        case str() as why:
            raise UsageError(f"`--model {model}`: {hub} can't be reached ({why}); {offline}")


def ask_hub(url: str, token: str | None) -> int | str:
    """The status of its answer, or why there is none."""
    request = urllib.request.Request(url, method="HEAD")
    if token:
        request.add_unredirected_header("authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=ASK_SECONDS) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        return str(getattr(why, "strerror", None) or why)


def is_cached(model: str, environ: Mapping[str, str]) -> bool:
    """Whether the hub's client keeps a copy, where its own variables say."""
    hub = environ.get("HF_HUB_CACHE")
    kept = Path(hub).expanduser() if hub else home_of(environ) / "hub"
    return any(kept.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"))


def token_of(environ: Mapping[str, str]) -> str | None:
    """What the hub's client would show: HF_TOKEN, or what `hf auth login` kept."""
    path = Path(environ.get("HF_TOKEN_PATH") or home_of(environ) / "token").expanduser()
    kept = path.read_text("utf-8").strip() if path.is_file() else None
    return environ.get("HF_TOKEN") or kept


def home_of(environ: Mapping[str, str]) -> Path:
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or cache / "huggingface").expanduser()
