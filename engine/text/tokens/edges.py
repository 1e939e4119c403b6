"""Edges: the places in a text at which no token could join what is before and behind."""

import json
from functools import cached_property

from tokenizers import Encoding, Tokenizer

_SPACE = "\u2581"  # SentencePiece's stand-in for a space
_LINE_ENDS = ("\n", "\r")
_SAMPLE = "one two, three"


class Edges:
    """Finds edges before tokens.

    A pre-tokenizer's words are never joined. A tokenizer without words (SentencePiece) may join any
    two characters that stand side by side in a token of its vocabulary, and no others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        words = tokenizer.encode(_SAMPLE, add_special_tokens=False).word_ids
        self._has_words = len(set(words)) > 1

    def of(self, text: str, encoding: Encoding) -> bytearray:
        """For every token of the text's encoding 1 where there is an edge before it, else 0.

        A token that begins with a line end counts as well: pre-tokenizers put line ends into the
        word of the punctuation before them, and templates write them or not. Pairs are never
        split once joined, so the tokens before such a token are those of the text without it.
        """
        words, offsets = encoding.word_ids, encoding.offsets
        edges = bytearray(len(words))
        last: int | None = -1
        for index, word in enumerate(words):
            begin = offsets[index][0] if word == last else 0
            if word != last or text[begin : begin + 1] in _LINE_ENDS:
                edges[index] = 1
                last = word
        if not self._has_words:
            self._add_unjoined(text, encoding, edges)
        return edges

    def _add_unjoined(self, text: str, encoding: Encoding, edges: bytearray) -> None:
        offsets = encoding.offsets
        for index in range(1, len(edges)):
            at = offsets[index - 1][1]
            if 0 < at < len(text) and offsets[index][0] >= at:
                pair = text[at - 1 : at + 1].replace(" ", _SPACE)
                edges[index] |= pair not in self._pairs

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Every two neighbouring characters of a token."""
        parts = json.loads(self._tokenizer.to_str())
        vocabulary = parts["model"]["vocab"]
        tokens = vocabulary if isinstance(vocabulary, dict) else (text for text, _ in vocabulary)
        return frozenset(token[i : i + 2] for token in tokens for i in range(len(token) - 1))
