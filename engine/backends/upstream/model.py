"""What the model's own files say that a server does not tell: sampling, context, vocabulary.

No torch here: the server has the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.upstream.server import ProbeTexts
from engine.text.files import read_json
from engine.text.renderer import ChatRenderer

PROBE_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.\n\n  def f(x):\n\treturn x ** 2\n",
    "Größe, naïve, 東京, Привет, 🙂👍🏽 — “quoted” …",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`temperature` 0 is greedy. `max_context_tokens` is what the model was trained for."""

    vocabulary_size: int
    max_context_tokens: int | None
    temperature: float
    top_p: float
    top_k: int


def model_facts(model: str, renderer: ChatRenderer) -> ModelFacts:
    """From a Hugging Face directory or hub id. Raises TemplateRefused for a broken file."""
    config, sampling = read_json(model, "config.json"), read_json(model, "generation_config.json")
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else config
    own = renderer.tokenizer.get_vocab_size(with_added_tokens=True)
    is_greedy = sampling.get("do_sample") is False
    return ModelFacts(
        vocabulary_size=max(own, _whole(inner.get("vocab_size")) or 0),
        max_context_tokens=_whole(inner.get("max_position_embeddings")),
        temperature=0.0 if is_greedy else _number(sampling.get("temperature"), 1.0),
        top_p=_number(sampling.get("top_p"), 1.0),
        top_k=_whole(sampling.get("top_k")) or 0,
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) and value >= 0 else default


def probe_texts(renderer: ChatRenderer) -> ProbeTexts:
    """What a server's tokenizer must agree with."""
    encode = renderer.tokenizer.encode
    return ProbeTexts({text: encode(text, add_special_tokens=False).ids for text in PROBE_TEXTS})
