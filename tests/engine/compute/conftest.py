"""Tiny models, made once each: their weights never change."""

import shutil
from collections.abc import Callable

import pytest
import torch

from engine.compute.loading import Attention
from tests.engine.compute.tiny import TinyModel, new_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


MakeModel = Callable[[str, Attention], TinyModel]


@pytest.fixture(scope="session")
def models_by_attention() -> MakeModel:
    models: dict[tuple[str, str], TinyModel] = {}

    def make(family: str, attention: Attention) -> TinyModel:
        if attention == "cpp" and shutil.which("g++") is None:
            pytest.skip("there is no C++ compiler")
        if (family, attention) not in models:
            models[family, attention] = new_tiny_model(family, attention)
        return models[family, attention]

    return make


@pytest.fixture(scope="session")
def tiny_models(models_by_attention: MakeModel) -> Callable[[str], TinyModel]:
    """With the attention that the machine's models get."""
    return lambda family: models_by_attention(family, "auto")


@pytest.fixture(params=["sdpa", "cpp"])
def both_attentions(
    models_by_attention: MakeModel, request: pytest.FixtureRequest
) -> Callable[[str], TinyModel]:
    """As `tiny_models`, by torch's own functions and by the kernel for CPUs."""
    return lambda family: models_by_attention(family, request.param)
