"""What GET /v1/models answers to OpenAI clients."""

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len`, in tokens, is what vLLM's clients look for."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "holdfast"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
