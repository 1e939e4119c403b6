"""A real model, which answers in words that people understand, behind a marked document."""

from pathlib import Path

import pytest
from anthropic import Anthropic

from scripts.setup.smollm2 import HOME
from scripts.stack import API_KEY, running_stack

pytestmark = pytest.mark.skipif(
    not HOME.exists(), reason="`scripts/run --model smollm2` has not made the model here"
)
DOCUMENT = "France is a country in Europe. Its capital is Paris. " * 100


def test_a_real_model_answers_alike_behind_a_written_and_a_read_prefix(tmp_path: Path) -> None:
    settings = {"ENGINE_MODEL": str(HOME), "ENGINE_NUM_BLOCKS": "512"}
    with running_stack(tmp_path, engine_settings=settings) as stack:
        with Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=600) as asked:
            # The newest version of the API has no temperature.
            client = asked.with_options(default_headers={"anthropic-version": "2023-06-01"})
            written, read = (
                client.messages.create(
                    model=HOME.name,
                    max_tokens=16,
                    extra_body={"temperature": 0},
                    system=[
                        {
                            "type": "text",
                            "text": DOCUMENT,
                            "cache_control": {"type": "ephemeral"},
                        }
                    ],
                    messages=[{"role": "user", "content": "What is the capital of France?"}],
                )
                for _ in range(2)
            )
    assert written.content[0].type == read.content[0].type == "text"
    assert "Paris" in written.content[0].text == read.content[0].text
    usages = written.usage, read.usage
    assert usages[0].cache_creation_input_tokens == usages[1].cache_read_input_tokens > 1000
