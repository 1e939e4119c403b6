"""How many bytes of text one token can stand for. A text of n bytes has n / that many at least."""

import json
from typing import Any

from tokenizers import Tokenizer

from engine.text.tokens.detokenize import Vocabulary

_NFC_SHRINKS = 3
"""A composed character has at most so many times fewer bytes than its parts (U+1F82, U+0390)."""


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of a text that one token stands for at most; 0 where there is no such bound.

    There is none where the tokenizer leaves text out: unknown characters that it fuses into one
    token, normalizers other than those known here, added tokens that take the white space beside
    them along.
    """
    parts = json.loads(tokenizer.to_str())
    factor = _factor(parts["normalizer"])
    added = tokenizer.get_added_tokens_decoder().values()
    if factor is None or any(token.lstrip or token.rstrip for token in added):
        return 0
    kinds = _kinds(parts["decoder"])
    if not kinds & {"ByteLevel", "ByteFallback"}:
        return 0
    vocabulary = Vocabulary(tokenizer).with_text({token.content for token in added})
    longest = max(len(vocabulary.bytes_of(token_id)) for token_id in tokenizer.get_vocab().values())
    return factor * longest


def _factor(normalizer: Any) -> int | None:
    """How many bytes of text become one of normalized text at most, None where nobody knows."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Sequence":
            factors = [_factor(inner) for inner in normalizer["normalizers"]]
            total = 1
            for factor in factors:
                if factor is None:
                    return None
                total *= factor
            return total
        case "NFC":
            return _NFC_SHRINKS
        case "Prepend":
            return 1
        case "Replace" if normalizer["pattern"] == {"String": " "} and normalizer["content"]:
            return 1
        case _:
            return None


def _kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))}
    for inner in decoder.get("decoders", ()):
        kinds |= _kinds(inner)
    return kinds
