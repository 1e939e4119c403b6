"""What it costs to read the entries of a sibling model (`python -m engine profile-variant`).

A sibling has the same architecture and tokenizer, and other weights. Of a prefix, the first k
layers' keys and values are computed with the model's own weights, and the sibling's are read in the
others (after DroidSpeak, arXiv 2411.02820, whose group of layers may also begin later). The model
goes on with texts of its own, and its distributions are compared with exact ones. The bounds are
those of the gate for compressed prefixes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from engine.compute.errors import ModelRefused
from engine.compute.gate import MAX_KL, MIN_AGREEMENT, PREFIX_TOKENS, REST_TOKENS, compared
from engine.compute.loading import has_state, layer_windows
from engine.protocol.reports import Technique

NUM_TEXTS = 8
MOST_COUNTS = 10
_OF_ONE_COPY = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Of a configuration: what does not change keys and values."""


@torch.inference_mode()
def profile(own_model: Any, sibling: Any, num_texts: int = NUM_TEXTS) -> Iterator[Technique]:
    """Two models of transformers, for some numbers of layers from none to all.

    Raises ModelRefused for models that are no siblings, or whose layers keep anything but keys and
    values of all tokens.
    """
    shapes = []
    configs = []
    for model in (own_model, sibling):
        shapes.append({name: value.shape for name, value in model.state_dict().items()})
        facts = model.config.to_dict()
        configs.append({name: facts[name] for name in facts.keys() - _OF_ONE_COPY})
    if type(own_model) is not type(sibling) or shapes[0] != shapes[1] or configs[0] != configs[1]:
        raise ModelRefused("the models differ in more than their weights")
    if has_state(own_model.config) or any(layer_windows(own_model.config)):
        raise ModelRefused("not every layer keeps keys and values of all tokens")
    begin = own_model.config.bos_token_id
    first = torch.full((num_texts, 1), begin if isinstance(begin, int) else 0)
    length = PREFIX_TOKENS + REST_TOKENS
    torch.manual_seed(1)
    texts = own_model.generate(
        first,
        attention_mask=torch.ones_like(first),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_length=length,
        max_length=length,
        pad_token_id=0,
    )
    prefix = texts[:, :PREFIX_TOKENS]
    rest = texts[:, PREFIX_TOKENS:]
    mine, theirs = (
        model(prefix, use_cache=True).past_key_values.layers for model in (own_model, sibling)
    )
    exact = list[torch.Tensor]()
    rows = list[Technique]()
    counts = {*range(0, len(mine), math.ceil(len(mine) / MOST_COUNTS)), len(mine)}
    for count in sorted(counts, reverse=True):
        cache = DynamicCache()
        for place, layer in enumerate([*mine[:count], *theirs[count:]]):
            cache.update(layer.keys, layer.values, place)
        logits = list(own_model(rest, past_key_values=cache).logits.float().log_softmax(-1))
        exact = exact or logits
        rows.append(compared("sibling", count, exact, logits))
    yield from reversed(rows)


def profile_directories(directories: tuple[str, str]) -> list[Technique]:
    """`profile` of the models in two directories. Raises ModelRefused, OSError and ValueError."""
    tokens: Any = AutoTokenizer
    auto: Any = AutoModelForCausalLM
    first, second = (tokens.from_pretrained(directory).get_vocab() for directory in directories)
    if first != second:
        raise ModelRefused("the models have different tokenizers")
    own_model, sibling = (
        auto.from_pretrained(directory, dtype=torch.float32, use_safetensors=True).eval()
        for directory in directories
    )
    return list(profile(own_model, sibling))


def judged(rows: Sequence[Technique]) -> list[Technique]:
    """With what the gate makes of each."""
    return [
        replace(row, is_allowed=row.kl <= MAX_KL and row.agreement >= MIN_AGREEMENT) for row in rows
    ]


def num_layers(rows: Sequence[Technique]) -> int:
    """Of the models. With all of them recomputed answers are exact."""
    return int(rows[-1].parameter)


def least_layers(rows: Sequence[Technique]) -> int | None:
    """The least number of own layers from which on all are allowed: fewer must not be luck. None
    where that is every layer."""
    refused = max((row.parameter for row in rows if not row.is_allowed), default=-1)
    counts = (int(row.parameter) for row in rows[:-1] if row.parameter > refused)
    return min(counts, default=None)


def told(rows: Sequence[Technique]) -> str:
    """A table, and what the gate makes of it."""
    most = num_layers(rows)
    lines = [" own layers   KL (nats)   same next token   gate"]
    lines += [
        f"{row.parameter:3} of {most:<3}   {row.kl:9.4f}   {row.agreement:15.1%}"
        f"   {'allowed' if row.is_allowed else 'refused'}"
        for row in rows
    ]
    least = least_layers(rows)
    verdict = "refuses the pair" if least is None else f"allows it from {least} of {most} layers on"
    bounds = f"at most {MAX_KL} nats, at least {MIN_AGREEMENT:.0%} the same"
    return "\n".join([*lines, f"The gate ({bounds}) {verdict}; {rows[0].tokens} tokens."])
