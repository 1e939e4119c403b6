"""How far a breakpoint looks back: 20 positions in Messages; in OpenAI's dialects the latest 80
breakpoints, over any number of positions (the SDK's own words on `prompt_cache_options`)."""

from collections.abc import Callable, Collection
from typing import Any

import pytest

from tests.vectors.world import MODEL, Vector

EXPLICIT = {"mode": "explicit"}
Body = Callable[[list[str], Collection[int]], dict[str, Any]]


def _parts(
    kind: str, marker: str, value: dict[str, Any], texts: list[str], marked: Collection[int]
) -> list[dict[str, Any]]:
    return [
        {"type": kind, "text": text} | ({marker: value} if index in marked else {})
        for index, text in enumerate(texts)
    ]


def chat(texts: list[str], marked: Collection[int]) -> dict[str, Any]:
    parts = _parts("text", "prompt_cache_breakpoint", EXPLICIT, texts, marked)
    return {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 1}


def responses(texts: list[str], marked: Collection[int]) -> dict[str, Any]:
    parts = _parts("input_text", "prompt_cache_breakpoint", EXPLICIT, texts, marked)
    return {"input": [{"role": "user", "content": parts}], "max_output_tokens": 16}


def messages(texts: list[str], marked: Collection[int]) -> dict[str, Any]:
    parts = _parts("text", "cache_control", {"type": "ephemeral"}, texts, marked)
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


OPENAI = pytest.mark.parametrize(
    ("path", "body"),
    [pytest.param("chat/completions", chat, id="chat"), pytest.param("responses", responses)],
)


def counts(vector: Vector, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """(read, written). OpenAI's cached tokens are also those that no entry was read for."""
    response = vector.world.post(path, {"model": MODEL, **body})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    holdfast = response.json()["holdfast"]
    if path == "messages":
        return usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    name = "prompt_tokens_details" if path.startswith("chat") else "input_tokens_details"
    return usage[name]["cached_tokens"] - holdfast["automatic_tokens"], holdfast["written_tokens"]


def texts_of(vector: Vector, num: int) -> list[str]:
    """The first is long enough for an entry."""
    first = f"{vector.name}{' the' * 1100}"
    return [first, *(f" the number {index} the" for index in range(1, num))]


@OPENAI
@pytest.mark.parametrize("steps", [19, 20, 90])
def test_an_entry_is_found_over_any_number_of_positions(
    vector: Vector, path: str, body: Body, steps: int
) -> None:
    texts = texts_of(vector, steps + 1)
    read_tokens, written_tokens = counts(vector, path, body(texts[:1], {0}))
    assert (read_tokens, written_tokens > 1024) == (0, True)
    again, more = counts(vector, path, body(texts, {steps}))
    assert (again, more > 0) == (written_tokens, True)
    # What was written at the end is read there, and goes before the shorter entry.
    assert counts(vector, path, body(texts, {steps})) == (written_tokens + more, 0)


@OPENAI
@pytest.mark.parametrize("num", [80, 81])
def test_the_latest_80_breakpoints_count(vector: Vector, path: str, body: Body, num: int) -> None:
    texts = texts_of(vector, num)
    _, written_tokens = counts(vector, path, body(texts[:1], {0}))
    read_tokens, more = counts(vector, path, body(texts, range(num)))
    # With 81 the entry is at the 81st. Four are written, so the others are none.
    assert read_tokens == (written_tokens if num == 80 else 0)
    assert more > (0 if num == 80 else written_tokens)


@pytest.mark.parametrize(("steps", "is_found"), [(19, True), (20, False)])
def test_messages_keep_twenty_positions(vector: Vector, steps: int, is_found: bool) -> None:
    texts = texts_of(vector, steps + 1)
    _, written_tokens = counts(vector, "messages", messages(texts[:1], {0}))
    read_tokens, _ = counts(vector, "messages", messages(texts, {steps}))
    assert read_tokens == (written_tokens if is_found else 0)


def test_what_a_dialect_wrote_is_found_by_the_readers_rule(vector: Vector) -> None:
    texts = texts_of(vector, 41)
    _, written_tokens = counts(vector, "messages", messages(texts[:1], {0}))
    read_tokens, _ = counts(vector, "chat/completions", chat(texts, {40}))
    assert read_tokens == written_tokens
