"""What every count and every token of a server must satisfy before it is believed."""

from collections.abc import Sequence

from engine.backends.upstream.model import ModelFacts
from engine.backends.upstream.server import UpstreamError, UpstreamRefused
from engine.cache.ids import TokenId


def check_prompt_tokens(told: int, cached: int | None, sent: int) -> None:
    """Raise UpstreamError unless the server computed the prompt that we sent."""
    if told != sent:
        raise UpstreamError(f"the server counted {told} tokens of a prompt of {sent}")
    if cached is not None and not 0 <= cached <= sent:
        raise UpstreamError(f"the server says that it reused {cached} of {sent} tokens")


def check_tokens(tokens: Sequence[int], vocabulary_size: int) -> list[TokenId]:
    """Raise UpstreamError for what is no token of the model."""
    if not all(0 <= token < vocabulary_size for token in tokens):
        raise UpstreamError("a token that the model does not have")
    return [TokenId(token) for token in tokens]


def check_context(told: int | None, files: ModelFacts) -> int:
    """The server's context in tokens; where it does not tell, what the model was trained for."""
    context = told or files.max_context_tokens
    if context is None or not 0 < context < 2**31:
        raise UpstreamRefused("neither the server nor the model's config.json tells a context")
    return context
