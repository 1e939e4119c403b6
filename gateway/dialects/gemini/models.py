"""The answers of GET /v1beta/models and /v1beta/models/{model}."""

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialects.gemini.response import Answered

METHODS = ["generateContent", "countTokens", "createCachedContent"]


class Model(Answered, frozen=True, rename="camel", kw_only=True):
    """`name` is `models/` and the id. A limit is left out where no engine tells it."""

    name: str
    base_model_id: str
    version: str = "1"
    display_name: str
    input_token_limit: int | UnsetType = UNSET
    output_token_limit: int | UnsetType = UNSET
    supported_generation_methods: list[str] = msgspec.field(default_factory=lambda: list(METHODS))


class ModelList(Answered, frozen=True, rename="camel", kw_only=True):
    models: list[Model]
    next_page_token: str | UnsetType = UNSET


def model_of(model_id: str, display_name: str, longest: int | None) -> Model:
    limit = UNSET if longest is None else longest
    return Model(
        name=f"models/{model_id}",
        base_model_id=model_id,
        display_name=display_name,
        input_token_limit=limit,
        output_token_limit=limit,
    )
