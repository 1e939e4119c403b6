"""Messages of clients that never mark, through the official SDK, with the policy for them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from anthropic import Anthropic
from anthropic.types import Message

from scripts.bench.load import marked
from scripts.stack import API_KEY, serving_engine, serving_gateway
from tests.gateway.serving import eventually

FAST = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "0"}
RULES = "Rules of the house: nobody sleeps on the stairs. " * 150


def ask(sdk: Anthropic, turns: list[Any], system: Any = RULES, **fields: Any) -> Message:
    return sdk.messages.create(
        model="synthetic", max_tokens=3, system=system, messages=turns, **fields
    )


def conversation(sdk: Anthropic, first: str) -> list[Message]:
    """Three turns, with nothing marked."""
    turns: list[Any] = [{"role": "user", "content": first}]
    answers = []
    for number in range(3):
        answers.append(ask(sdk, turns))
        turns.append({"role": "assistant", "content": [{"type": "text", "text": "Yes."}]})
        turns.append({"role": "user", "content": f"And then, {number}?"})
    return answers


def extension(message: Message) -> dict[str, Any]:
    holdfast: dict[str, Any] = (message.model_extra or {})["holdfast"]
    return holdfast


def test_what_marks_nothing_is_held_where_the_setting_says_so(tmp_path: Path) -> None:
    settings = {"HOLDFAST_AUTO_CACHE_MESSAGES": "true"}
    with (
        serving_engine("synthetic", FAST) as engine,
        serving_gateway(tmp_path / "on", [engine.url], settings) as holding,
        serving_gateway(tmp_path / "off", [engine.url]) as plain,
    ):
        holding.wait()
        plain.wait()
        with Anthropic(base_url=holding.url, api_key=API_KEY, max_retries=0, timeout=120) as sdk:
            answers = conversation(sdk, "Who sleeps where?")
            for before, after in pairwise(answers):
                usage = after.usage
                last = before.usage
                whole = (last.cache_read_input_tokens or 0) + last.cache_creation_input_tokens
                assert usage.cache_read_input_tokens == whole, "all that was held is read"
                assert extension(after)["auto_cache"] == {"mode": "conversation", "ttl": "5m"}
            top = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
            for system, options in ((marked(RULES), {}), (RULES, {"extra_body": top})):
                holdfast = extension(
                    ask(sdk, [{"role": "user", "content": "Hi"}], system, **options)
                )
                assert "auto_cache" not in holdfast and len(holdfast["breakpoints"]) == 1
            row = {"model": "synthetic", "max_tokens": 3, "system": RULES}
            params: Any = {**row, "messages": [{"role": "user", "content": "Who sleeps where?"}]}
            batch = sdk.messages.batches.create(requests=[{"custom_id": "a", "params": params}])
            eventually(lambda: sdk.messages.batches.retrieve(batch.id).processing_status == "ended")
            (result,) = sdk.messages.batches.results(batch.id)
            assert result.result.type == "succeeded"
            assert result.result.message.usage.cache_read_input_tokens
        with Anthropic(base_url=plain.url, api_key=API_KEY, max_retries=0, timeout=120) as sdk:
            for answer in conversation(sdk, "Who sleeps here?"):
                usage = answer.usage
                assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)
