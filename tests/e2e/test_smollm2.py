"""A real model, which answers in words that people understand, behind a marked document."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.setup.smollm2 import HOME
from tests.e2e.fleet import running_fleet

pytestmark = pytest.mark.skipif(
    not HOME.exists(), reason="`scripts/run --model smollm2` has not made the model here"
)
DOCUMENT = "France is a country in Europe. Its capital is Paris. " * 100


def test_a_real_model_answers_alike_behind_a_written_and_a_read_prefix(tmp_path: Path) -> None:
    settings = {"ENGINE_MODEL": str(HOME), "ENGINE_NUM_BLOCKS": "512"}
    with running_fleet(tmp_path, settings=settings, backend="native") as fleet:
        asking = replace(fleet.gateway, model=HOME.name)
        question = "What is the capital of France?"
        writer, reader = (
            asking.answer(DOCUMENT, question, max_tokens=16, temperature=0) for _ in range(2)
        )
    assert "Paris" in writer["content"][0]["text"] == reader["content"][0]["text"]
    tokens = writer["usage"]["cache_creation_input_tokens"]
    assert tokens == reader["usage"]["cache_read_input_tokens"] > 1000
