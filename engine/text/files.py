"""What a Hugging Face directory or hub id says about prompts: tokenizer, template, end tokens."""

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
    """What a model's folder has for writing prompts."""

    tokenizer: Tokenizer
    # By name.
    templates: dict[str, str]
    # As templates know them.
    special_tokens: dict[str, str]
    # Those that the files declare.
    end_token_ids: frozenset[TokenId]


def read_prompt_files(model: str) -> PromptFiles:
    """Raises TemplateRefused, naming the file, where something needed is missing or broken."""
    tokenizer_path = _find_file(model, "tokenizer.json")
    if tokenizer_path is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = _converted(model)
    # Lengths are the engine's business: a tokenizer that cuts or pads would lie about offsets.
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
    """How a model's makers would sample, by its generation_config.json. Without `do_sample` that is
    greedy. A value that no request may have is left out, such as the -1 that switches `top_k` off.
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
    """A SentencePiece, tiktoken or tekken vocabulary, as transformers converts it.

    transformers is imported here: that takes seconds, and few models need it. It reads them with
    `sentencepiece`, `tiktoken` and `mistral-common`. Code that a model brings with it is not run.
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
            # For these AutoTokenizer returns a tokenizer of mistral-common's own.
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
    """`chat_template.jinja` goes before the setting, and the folder's are beside it, as in
    transformers. `chat_template.json` is where models with processors keep theirs.
    """
    path = _find_file(model, "chat_template.jinja")
    setting = setting if path is None else path.read_text(encoding="utf-8")
    if isinstance(setting, str):
        paths = sorted(Path(model, _TEMPLATE_FOLDER).glob("*.jinja"))
        # A hub repository's files are not listed: `tool_use` is the only name that is used.
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
    path = _find_file(model, name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TemplateRefused(f"`model`: {name} of {model} is no JSON") from error
    return content if isinstance(content, dict) else {}


def model_folder(model: str) -> Path | None:
    """Where a model's files lie; None for a hub id of which there is no `config.json`."""
    if Path(model).is_dir():
        return Path(model)
    config = _find_file(model, "config.json")
    return None if config is None else config.parent


def _find_file(model: str, name: str) -> Path | None:
    """A file of a directory, or else of a hub repository (cached as transformers caches it)."""
    if Path(model).is_dir():
        path = Path(model, name)
        return path if path.is_file() else None
    # Imported here: that is a third of a worker's start.
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
