"""Reads a model's tokenizer, chat template and end tokens from a Hugging Face directory or hub
id."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.cache.ids import TokenId
from engine.protocol import NEUTRAL, Sampling
from engine.text.rendered import TemplateRefused

_TEKKEN = "tekken.json"
_VOCABULARIES = (_TEKKEN, "tokenizer.model", "tiktoken.model", "spiece.model")
_TEMPLATE_FOLDER = "additional_chat_templates"  # transformers.utils.CHAT_TEMPLATE_DIR
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """The parts of a model's files by which prompts are written."""

    tokenizer: Tokenizer
    # The sources of the chat templates, by name.
    templates: dict[str, str]
    # The texts of special tokens, by the names that templates use, such as `eos_token`.
    special_tokens: dict[str, str]
    # The tokens that end a turn, according to the model's files.
    end_token_ids: frozenset[TokenId]


def read_prompt_files(model: str) -> PromptFiles:
    """Read the files of a directory or hub id.

    Raises TemplateRefused, which names the file, if a needed one is missing or broken.
    """
    tokenizer_path = _find_file(model, "tokenizer.json")
    if tokenizer_path is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = _converted(model)
    # The engine itself checks lengths. A tokenizer that cuts or pads would give wrong offsets.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = read_json(model, "tokenizer_config.json")
    special_tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        text = settings.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if text and isinstance(text, str):
            special_tokens[name] = text
    ends: set[TokenId | None] = set()
    for file in ("generation_config.json", "config.json"):
        declared = read_json(model, file).get("eos_token_id")
        ends.update(declared if isinstance(declared, list) else [declared])
    if "eos_token" in special_tokens:
        ends.add(tokenizer.token_to_id(special_tokens["eos_token"]))
    return PromptFiles(
        tokenizer=tokenizer,
        templates=_templates(model, settings.get("chat_template")),
        special_tokens=special_tokens,
        end_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
    )


def recommended(declared: Mapping[str, Any]) -> Sampling:
    """The sampling that a model's makers recommend in its generation_config.json.

    A `do_sample` of false means greedy. A value that no request may have is left out, such as the
    -1 that switches `top_k` off.
    """
    settings: dict[str, Any] = {"max_tokens": None}
    if declared.get("do_sample") is False:
        declared = {**declared, "temperature": 0.0}
    for name in NEUTRAL:
        with suppress(msgspec.ValidationError):
            msgspec.convert({"max_tokens": None, name: declared.get(name)}, Sampling)
            settings[name] = declared.get(name)
    return Sampling(**settings)


def _converted(model: str) -> Tokenizer:
    """A SentencePiece, tiktoken or tekken vocabulary, converted by transformers.

    transformers is imported only here, because that takes seconds and few models need it. It reads
    the files with `sentencepiece`, `tiktoken` and `mistral-common`. A model's own code is not run.
    """
    paths = (_find_file(model, name) for name in _VOCABULARIES)
    path = next(filter(None, paths), None)
    if path is None:
        raise TemplateRefused(
            f"`model`: {model} has no tokenizer.json, nor any of {', '.join(_VOCABULARIES)}"
        )
    tokenizer: Any
    try:
        if path.name == _TEKKEN:
            # For a tekken file AutoTokenizer returns mistral-common's tokenizer instead.
            from transformers.integrations.mistral.tokenizer import MistralConverter

            tokenizer = MistralConverter(str(path)).converted()
        else:
            from transformers import AutoTokenizer

            known = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            tokenizer = known.backend_tokenizer
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        message = f"`model`: {path.name} of {model} can't be converted: {reason}"
        raise TemplateRefused(message) from error
    if not isinstance(tokenizer, Tokenizer):
        message = f"`model`: {path.name} of {model} has no form that the engine can use"
        raise TemplateRefused(message)
    return Tokenizer.from_str(tokenizer.to_str())


def _templates(model: str, setting: Any) -> dict[str, str]:
    """The chat templates by name, found as transformers finds them.

    `chat_template.jinja` wins over the setting, and the files of _TEMPLATE_FOLDER are added to it.
    Models with processors have their template in `chat_template.json`.
    """
    path = _find_file(model, "chat_template.jinja")
    setting = setting if path is None else path.read_text(encoding="utf-8")
    if isinstance(setting, str):
        paths = sorted(Path(model, _TEMPLATE_FOLDER).glob("*.jinja"))
        # A hub repository's files can't be listed here. `tool_use` is the only name in use.
        if not Path(model).is_dir():
            tool_use = _find_file(model, f"{_TEMPLATE_FOLDER}/tool_use.jinja")
            paths = [] if tool_use is None else [tool_use]
        return {"default": setting, **{path.stem: path.read_text("utf-8") for path in paths}}
    if isinstance(setting, list):
        return {str(named["name"]): str(named["template"]) for named in setting}
    processor = read_json(model, "chat_template.json").get("chat_template")
    if isinstance(processor, str):
        return {"default": processor}
    raise TemplateRefused(f"`model`: {model} has no chat template")


def read_json(model: str, name: str) -> dict[str, Any]:
    """The object in one of a model's files; empty without the file, or if it has no object.

    Raises TemplateRefused if the file is no JSON.
    """
    path = _find_file(model, name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TemplateRefused(f"`model`: {name} of {model} is no JSON") from error
    return content if isinstance(content, dict) else {}


def model_folder(model: str) -> Path | None:
    """The folder of a model's files; None for a hub id without a `config.json`."""
    if Path(model).is_dir():
        return Path(model)
    config = _find_file(model, "config.json")
    return None if config is None else config.parent


def _find_file(model: str, name: str) -> Path | None:
    """A file of a directory, or else of a hub repository (cached as transformers caches it)."""
    if Path(model).is_dir():
        path = Path(model, name)
        return path if path.is_file() else None
    # Imported only here, because the import takes a third of a worker's start.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError as error:
        message = f"`model`: {model} is no directory and no reachable hub id"
        raise TemplateRefused(message) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, ValueError) as error:
        raise TemplateRefused(f"`model`: {model} is no directory and no hub id") from error
