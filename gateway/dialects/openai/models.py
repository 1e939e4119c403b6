"""The answers of GET /v1/models to OpenAI clients."""

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len`, in tokens, is for clients of vLLM."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "holdfast"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
