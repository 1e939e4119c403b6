"""Measures how much quality is lost when a model reads a sibling model's entries.

`python -m engine profile-variant` runs it. A sibling has the same architecture and tokenizer, and
other weights. For the first k layers the keys and values of a prefix are computed with the model's
own weights. For the other layers the sibling's keys and values are read. DroidSpeak does the same
(arXiv 2411.02820), but its group of computed layers may also begin later. The model then continues
texts of its own, and its distributions are compared with exact ones. The bounds are the gate's.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from engine.compute.errors import ModelRefused
from engine.compute.gate import MAX_KL, MIN_AGREEMENT, PREFIX_TOKENS, REST_TOKENS, compare
from engine.compute.loading import has_state, layer_windows
from engine.protocol.reports import Technique

NUM_TEXTS = 8
MAX_STEPS = 10
"""The most steps from no computed layer to all of them."""
_WITHOUT_EFFECT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""The fields of a configuration that don't change keys and values."""


@torch.inference_mode()
def profile(own_model: Any, sibling: Any, num_texts: int = NUM_TEXTS) -> Iterator[Technique]:
    """Compare two models of transformers. Yield a result for each measured number of computed
    layers, from none to all.

    Raises ModelRefused for models that are no siblings, or that have layers which keep anything but
    the keys and values of all tokens.
    """
    _check_siblings(own_model, sibling)
    texts = _new_texts(own_model, num_texts)
    prefix = texts[:, :PREFIX_TOKENS]
    rest = texts[:, PREFIX_TOKENS:]
    own_layers = own_model(prefix, use_cache=True).past_key_values.layers
    sibling_layers = sibling(prefix, use_cache=True).past_key_values.layers
    num_layers = len(own_layers)
    step = math.ceil(num_layers / MAX_STEPS)
    counts = sorted({*range(0, num_layers, step), num_layers})
    exact: list[torch.Tensor] = []
    rows: list[Technique] = []
    for count in reversed(counts):
        cache = DynamicCache()
        for place, layer in enumerate([*own_layers[:count], *sibling_layers[count:]]):
            cache.update(layer.keys, layer.values, place)
        log_probs = list(own_model(rest, past_key_values=cache).logits.float().log_softmax(-1))
        if count == num_layers:
            exact = log_probs
        rows.append(compare("sibling", count, exact, log_probs))
    yield from reversed(rows)


def _check_siblings(own_model: Any, sibling: Any) -> None:
    own_shapes = {name: value.shape for name, value in own_model.state_dict().items()}
    sibling_shapes = {name: value.shape for name, value in sibling.state_dict().items()}
    is_same = type(own_model) is type(sibling) and own_shapes == sibling_shapes
    if not is_same or _config_of(own_model) != _config_of(sibling):
        raise ModelRefused("the models differ in more than their weights")
    if has_state(own_model.config) or any(layer_windows(own_model.config)):
        raise ModelRefused("not every layer keeps keys and values of all tokens")


def _config_of(model: Any) -> dict[str, Any]:
    config = model.config.to_dict()
    return {name: config[name] for name in config.keys() - _WITHOUT_EFFECT}


def _new_texts(model: Any, num_texts: int) -> torch.Tensor:
    """Texts (texts, tokens) that the model draws."""
    begin = model.config.bos_token_id
    first = torch.full((num_texts, 1), begin if isinstance(begin, int) else 0)
    length = PREFIX_TOKENS + REST_TOKENS
    torch.manual_seed(1)
    texts: torch.Tensor = model.generate(
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
    return texts


def profile_directories(directories: tuple[str, str]) -> list[Technique]:
    """Run `profile` with the models of two directories: the model's own and the sibling's.

    Raises ModelRefused, OSError and ValueError.
    """
    tokenizers: Any = AutoTokenizer
    models: Any = AutoModelForCausalLM
    vocabularies = [tokenizers.from_pretrained(path).get_vocab() for path in directories]
    if vocabularies[0] != vocabularies[1]:
        raise ModelRefused("the models have different tokenizers")
    pair = [
        models.from_pretrained(path, dtype=torch.float32, use_safetensors=True).eval()
        for path in directories
    ]
    return list(profile(pair[0], pair[1]))


def judge(rows: Sequence[Technique]) -> list[Technique]:
    """The rows, judged anew by the bounds of this version's gate."""
    return [
        replace(row, is_allowed=row.kl <= MAX_KL and row.agreement >= MIN_AGREEMENT) for row in rows
    ]


def num_layers(rows: Sequence[Technique]) -> int:
    """The number of layers of the models. With all layers computed, answers are exact."""
    return int(rows[-1].parameter)


def least_layers(rows: Sequence[Technique]) -> int | None:
    """The least number of computed layers that the gate allows; None if it is all layers.

    All measured greater numbers must be allowed too, so that no single result decides.
    """
    refused = max((row.parameter for row in rows if not row.is_allowed), default=-1)
    counts = (int(row.parameter) for row in rows[:-1] if row.parameter > refused)
    return min(counts, default=None)


def table_of(rows: Sequence[Technique]) -> str:
    """A table of the rows, and the gate's verdict, for a terminal."""
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
