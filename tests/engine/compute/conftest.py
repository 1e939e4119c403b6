"""Tiny models, made once each: their weights never change."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.compute.tiny import TinyModel, new_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_models() -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            made[family] = new_tiny_model(family)
        return made[family]

    return make
