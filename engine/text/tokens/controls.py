"""The texts of control tokens: which they are, and where a client's text could make one."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from engine.cache.ids import TokenId

# Special tokens are control tokens by declaration; others by looking like markup, as `<tool_call>`
# or `[INST]` do, or by being written in the chat template. The rest (runs of spaces) is text.
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)


class ControlMatch(NamedTuple):
    """Characters [begin, end) of a text are the text of control token `token_id`."""

    begin: int
    end: int
    token_id: TokenId


class ControlTexts:
    """Finds control tokens' texts. `ids` maps each text to its token."""

    def __init__(self, ids: Mapping[str, TokenId]) -> None:
        self.ids = dict(ids)
        self.pattern = _pattern(self.ids)
        self._longest = max(map(len, self.ids), default=0)
        self._firsts = {text[0] for text in self.ids}
        self._lasts = {text[-1] for text in self.ids}
        self._joined = "\0".join(self.ids)

    def matches(self, text: str) -> list[ControlMatch]:
        """Leftmost, longest and without overlaps, as tokenizers match added tokens."""
        if self.pattern is None:
            return []
        return [
            ControlMatch(match.start(), match.end(), self.ids[match.group()])
            for match in self.pattern.finditer(text)
        ]

    def cut(self, text: str, mark: str) -> str:
        """The text with `mark` behind the first character of every control token's text in it.

        Inside of it, so that the text is none even where a template changes the mark. The rest is
        searched again: a shorter control token may begin inside.
        """
        if self.pattern is None:
            return text
        pieces: list[str] = []
        last = 0
        match = self.pattern.search(text)
        while match is not None:
            is_long = match.end() - match.start() > 1
            pieces += [text[last : match.start() + is_long], mark]
            last = match.start() + is_long
            match = self.pattern.search(text, match.start() + 1)
        pieces.append(text[last:])
        return "".join(pieces)

    def completed_by(self, text: str) -> frozenset[str]:
        """The control texts that are not in this text, but could be with template text around it.

        A template that writes `<` + name + `>` makes `<think>` of a tool that is named `think`.
        """
        text = text.strip()
        if not text:
            return frozenset()
        found: set[str] = set()
        if len(text) < self._longest and text in self._joined:
            found.update(c for c in self.ids if text in c and text != c)
        tail, head = text[1 - self._longest :], text[: self._longest - 1]
        for character in self._firsts:
            at = tail.find(character)
            while at >= 0:
                rest = tail[at:]
                found.update(c for c in self.ids if len(c) > len(rest) and c.startswith(rest))
                at = tail.find(character, at + 1)
        for character in self._lasts:
            at = head.find(character)
            while at >= 0:
                begin = head[: at + 1]
                found.update(c for c in self.ids if len(c) > len(begin) and c.endswith(begin))
                at = head.find(character, at + 1)
        return frozenset(found)

    def cut_completing(self, text: str, mark: str, controls: Collection[str]) -> str:
        """The text with `mark` before each place where one of these could begin or go on."""
        body = text.strip()
        at = text.find(body)
        places: set[int] = set()
        for control in controls:
            if body and body in control:
                places.add(0)
            for size in range(1, min(len(control), len(body) + 1)):
                if body.endswith(control[:size]):
                    places.add(len(body) - size)
                if body.startswith(control[-size:]):
                    places.add(0)
        for place in sorted(places, reverse=True):
            text = text[: at + place] + mark + text[at + place :]
        return text


def find_controls(
    tokenizer: Tokenizer, template: str = "", declared: Iterable[TokenId] = ()
) -> ControlTexts:
    """The control tokens of a tokenizer; `declared` are those that the model's files name."""
    ends = frozenset(declared)
    return ControlTexts(
        {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content.strip() and _is_control(token, token_id, template, ends)
        }
    )


def _is_control(token: Any, token_id: TokenId, template: str, ends: frozenset[TokenId]) -> bool:
    content: str = token.content
    if token.special or token_id in ends or _MARKUP.fullmatch(content):
        return True
    # A word that the tokenizer keeps whole, and that the template writes, has a meaning there.
    return len(content) > 1 and content in template


def _pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    if not texts:
        return None
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
