"""Log-probabilities in OpenAI's form, which Chat Completions and Responses share."""

from collections.abc import Sequence

import msgspec

from engine.protocol import DrawnToken, TokenProb


class TopLogprob(msgspec.Struct, frozen=True):
    """`token` is the text of `bytes`; where a character spans tokens, only `bytes` are exact."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def logprobs_of(drawn: Sequence[DrawnToken]) -> list[TokenLogprob]:
    return [
        TokenLogprob(*_told(one.drawn), [TopLogprob(*_told(likely)) for likely in one.top])
        for one in drawn
    ]


def _told(prob: TokenProb) -> tuple[str, float, list[int]]:
    return prob.token.decode(errors="replace"), prob.logprob, list(prob.token)
