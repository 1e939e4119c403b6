"""Whose template and tokenizer a vLLM uses, by its own arguments."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from engine.backends.prepare.prepared import WorkerSpec
from engine.settings import Settings

# What `engine.text.files` reads.
FILES = ["*.json", "*.jinja", "additional_chat_templates/*", "*.model"]
WEIGHTS = ["*.safetensors.index.json", "*.bin.index.json"]


def renderer_of(llm: Any, args: Namespace, settings: Settings) -> WorkerSpec:
    """Of `--tokenizer`, `--tokenizer-revision`, `--revision` and `--chat-template`.

    Raises what the hub's client raises where a hub id's files are neither cached nor reachable.
    """
    model = llm.vllm_config.model_config
    return WorkerSpec(
        kind="chat",
        model=_directory(
            model.tokenizer or model.model,
            model.tokenizer_revision or model.revision,
            llm.vllm_config.load_config.download_dir,
        ),
        template=_template(args),
        # A tokenizer of another directory need not know how the model ends its turns.
        end_token_ids=_end_token_ids(model.try_get_generation_config().get("eos_token_id")),
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        template_date=settings.template_date,
    )


def _directory(name: str, revision: str | None, download_dir: str | None) -> str:
    if Path(name).is_dir():
        return name
    return snapshot_download(
        name,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=FILES,
        ignore_patterns=WEIGHTS,
    )


def _template(args: Namespace) -> str | None:
    """`--chat-template`: a file's path, or the template itself."""
    given: str | None = getattr(args, "chat_template", None)
    if given is None or "\n" in given or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")


def _end_token_ids(declared: Any) -> list[int]:
    if declared is None:
        return []
    return list(declared) if isinstance(declared, list) else [declared]
