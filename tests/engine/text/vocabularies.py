"""Tokenizers of the kinds that models come with, trained here on text like theirs.

Their merges cross punctuation as real ones' do: `"}}` or `.\\n\\n` are one token each, so a text's
tokens depend on what follows it. The demonstration tokenizer's do not.
"""

import json
import re
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from engine.text.files import PromptFiles

ROOT = Path(__file__).resolve().parents[3]
# The pre-tokenizers of Llama 3, of Qwen 2 and of Mistral's Tekken.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"llama3": LLAMA_3, "qwen2": QWEN_2, "tekken": TEKKEN}
KINDS = [*BYTE_LEVEL, "sentencepiece", "metaspace"]
_CONTROL = re.compile(
    r"<\|[\w▁ ]+\|>|\[/?[A-Z_]+\]|<｜[^｜]+｜>|<(?:start|end)_of_turn>|</?think>|</?tool_call>"
    r"|</?seed:\w+>|\]~!?b\[|\]~b\]|\[e~\[|<sop>|\[gMASK\]|</?(?:tool_response|arg_key|arg_value)>"
)


def corpus() -> list[str]:
    """English, JSON, markup and templates: what prompts are made of, and what seldom changes."""
    texts = [(ROOT / "LICENSE").read_text("utf-8")]
    templates = Path(__file__).with_name("chat_templates")
    texts += [path.read_text("utf-8") for path in sorted(templates.glob("*.jinja"))]
    for index in range(300):
        properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": ["city"]}
        about = {"description": f"Gives the weather of day {index}.", "parameters": schema}
        tool = {"type": "function", "function": {"name": f"get_{index}", **about}}
        texts += [json.dumps(tool), json.dumps([tool], indent=4)]
        texts += [f'<tool_call>\n{{"name": "f", "arguments": {{"city": "Bern {index}"}}}}\n']
    return texts


@cache
def trained(kind: str) -> Tokenizer:
    """One of `KINDS`, without control tokens."""
    if kind in BYTE_LEVEL:
        tokenizer = Tokenizer(models.BPE(ignore_merges=kind != "qwen2"))
        tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None
        split = pre_tokenizers.Split(Regex(BYTE_LEVEL[kind]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=3000,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(corpus(), trainer)
        return tokenizer
    return _sentencepiece(by_metaspace=kind == "metaspace")


def _sentencepiece(*, by_metaspace: bool) -> Tokenizer:
    """Words of one metaspace each, as SentencePiece trains; encodes without words, as it does."""
    space = "\u2581"
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(space, behavior="merged_with_next")
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=specials, show_progress=False)
    # SentencePiece has no pieces with line ends: they are bytes.
    tokenizer.train_from_iterator((text.replace("\n", " ") for text in corpus()), trainer)
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = parts["added_tokens"][:3]
    parts["pre_tokenizer"] = None
    if by_metaspace:
        parts["normalizer"] = None
        parts["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": space, "prepend_scheme": "first", "split": False
        }  # fmt: skip
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return tokenizer


def tokenizer_for(template: str, kind: str) -> Tokenizer:
    """Of a kind, with the template's control tokens."""
    tokenizer = Tokenizer.from_str(trained(kind).to_str())
    texts = {*_CONTROL.findall(template), "<|endoftext|>", "<|im_end|>"}
    # What is markup without bars is no special token in Qwen's and others' tokenizers.
    for text in sorted(text for text in texts if tokenizer.token_to_id(text) is None):
        is_special = "|" in text or "｜" in text or text[0] in "[]"
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(text, normalized=False)])
    return tokenizer


def files_for(template: str, kind: str = "llama3") -> PromptFiles:
    """A tokenizer whose merges cross punctuation, with the template's control tokens."""
    return PromptFiles(
        tokenizer=tokenizer_for(template, kind),
        templates={"default": template},
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        end_token_ids=frozenset(),
    )
