"""The parts of OpenAI's wire format that several kinds of servers have."""

import msgspec

from engine.backends.upstream.server import UpstreamRefused
from engine.backends.upstream.wire import Wire, check_status, decoded

MODELS = "/v1/models"


class Model(msgspec.Struct):
    """`max_model_len` is vLLM's, and some others': the context in tokens."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens the server reused; None where it does not tell."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


async def find_model(wire: Wire, name: str) -> Model:
    """The server's model of this name, or its only one where the name is empty.

    Raises UpstreamRefused where it has none or several.
    """
    status, answer = await wire.get(MODELS)
    check_status(status, MODELS)
    models = decoded(answer, _Models, MODELS).data
    found = [model for model in models if name in ("", model.id)]
    if len(found) != 1:
        names = ", ".join(model.id for model in models[:8])
        raise UpstreamRefused(f"ENGINE_UPSTREAM_MODEL must name one of the server's: {names}")
    return found[0]
