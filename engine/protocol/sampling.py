"""How the tokens of an answer are drawn."""

from collections.abc import Collection, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from engine.protocol.bounds import (
    MAX_ALLOWED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_STOP_TOKENS,
    NotNegative,
)
from engine.protocol.capabilities import Capability


# What a new field needs:
# - its place in `Sampling` and its rule in FIELD_RULES. A field with a neutral value shapes a draw:
#   `SampleParams` (`schedule/runner.py`) then has a field of that name, and a model may come with a
#   value of it;
# - its capability in `Capability`, and in the table of `PROTOCOL.md`;
# - each backend that can. The native engine draws in `compute/sampler.py`; what no CUDA graph draws
#   has a line in `compute/graphs/rule.py`. `vllm_sampling` (`backends/external.py`) tells vLLM, and
#   the body of a request tells a server (`backends/upstream/servers.py`);
# - where these declare it: NATIVE_AND_VLLM, `backends/native.py`, `backends/vllm/backend.py`, and
#   the servers' `Facts`;
# - a field of that name in the requests of the dialects that have it (`gateway/dialects`). Another
#   name is a line of SAMPLING_NAMES in `gateway/prompt/ask.py`.
# Nothing else: the check of what an engine can do, the refusal by name and the defaults are derived
# from FIELD_RULES. An engine without the capability, such as an older one, is not sent the field.
class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How each token of an answer is drawn, and where the answer ends.

    If a field that has a neutral value is None, the model's makers' value holds.
    """

    # None: the rest of the context. With 0 the request only warms the cache.
    max_tokens: NotNegative | None
    # 0 is greedy.
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    # 1 is off.
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    # 0 is off.
    top_k: NotNegative | None = None
    stop_sequences: list[str] = []
    # Makes sampling repeatable on one engine build.
    seed: int | None = None
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    # Whether generation goes on past the tokens that end a turn.
    ignore_eos: bool = False
    # Subtracted from the logit of each token that the choice has. The prompt does not count.
    presence_penalty: float | None = None
    # Subtracted from a token's logit for each time that the choice has it, without the prompt.
    frequency_penalty: float | None = None
    # Divides positive logits and multiplies negative ones, of tokens in the prompt or the choice.
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_PENALTY)] | None = None
    # Added to the logits of these tokens, by token id.
    logit_bias: dict[int, float] = {}
    # How many of the most likely tokens are told for each token; None: no log-probabilities.
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # The least probability of a drawn token, as a part of the most likely token's.
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Further tokens that end a turn.
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKENS)] = []
    # The fewest tokens before one may end the turn.
    min_tokens: NotNegative = 0
    # The only tokens that may be drawn, ends of a turn among them; empty: all.
    allowed_token_ids: Annotated[list[NotNegative], Meta(max_length=MAX_ALLOWED_TOKENS)] = []

    @property
    def needs(self) -> list[tuple[str, Capability]]:
        """The fields that ask for something, each with the capability that does it."""
        return [
            (name, rule.capability)
            for name, rule in FIELD_RULES.items()
            if rule.capability is not None
            and getattr(self, name) not in (None, rule.neutral, getattr(_UNSET, name))
        ]

    def within(self, capabilities: Collection[str]) -> "Sampling":
        """A copy in which fields that an engine of these capabilities ignores ask for nothing."""
        beyond = [
            name
            for name, rule in FIELD_RULES.items()
            if rule.capability is not None and rule.capability not in capabilities
        ]
        if not beyond:
            return self
        return msgspec.structs.replace(self, **{name: getattr(_UNSET, name) for name in beyond})


_UNSET = Sampling(max_tokens=None)


class FieldRule(NamedTuple):
    """What a field of `Sampling` needs, and what it is when nobody sets it."""

    # The capability that an engine needs for it. None: every engine can.
    capability: Capability | None
    # The value if neither the request nor the model's makers set one. It asks for nothing. None:
    # the field does not shape a draw, or its default in `Sampling` is such a value.
    neutral: float | None = None


FIELD_RULES: Mapping[str, FieldRule] = {
    "temperature": FieldRule(None, 1.0),
    "top_p": FieldRule(None, 1.0),
    "top_k": FieldRule("own_template", 0),
    "min_p": FieldRule("min_p", 0.0),
    "repetition_penalty": FieldRule("repetition_penalty", 1.0),
    "presence_penalty": FieldRule("penalties", 0.0),
    "frequency_penalty": FieldRule("penalties", 0.0),
    "logit_bias": FieldRule("penalties"),
    "num_choices": FieldRule("multiple_choices"),
    "ignore_eos": FieldRule("own_template"),
    "stop_token_ids": FieldRule("stop_token_ids"),
    "min_tokens": FieldRule("min_tokens"),
    "allowed_token_ids": FieldRule("allowed_token_ids"),
    "logprobs": FieldRule("logprobs"),
}
"""The rules of all fields but `max_tokens`, `stop_sequences` and `seed`, which every engine has."""

NEUTRAL: Mapping[str, float] = {
    name: rule.neutral for name, rule in FIELD_RULES.items() if rule.neutral is not None
}
"""The neutral values by field.

Each name is a field of `Sampling` and `SampleParams`: `new_samples` (`backends/queries.py`) makes
the second of the first by these names.
"""

NATIVE_AND_VLLM: tuple[Capability, ...] = (
    "penalties",
    "repetition_penalty",
    "min_p",
    "stop_token_ids",
    "min_tokens",
    "allowed_token_ids",
)
"""The capabilities for fields of `Sampling` that the native engine and vLLM both have."""
