"""A salt, as vLLM's and SGLang's clients send it, narrows the workspace's scope in each dialect.

The engine is synthetic: a real pool with real entries and leases.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.prompt.ask import camel
from scripts.stack import API_HEADERS, Stack, running_stack
from tests.gateway.admin_client import Admin

MODEL = "synthetic"
SYSTEM = "Rules of the house. " * 400


class Reused(NamedTuple):
    """The turn's id, and its tokens that were read from entries, or reused without one."""

    turn_id: str
    num_tokens: int


Api = Callable[[httpx.Client, str, dict[str, str]], Reused]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"ENGINE_SYNTHETIC_PREFILL_US": "0.1", "ENGINE_SYNTHETIC_DECODE_MS": "0.1"}
    data: Path = tmp_path_factory.mktemp("salted")
    with running_stack(data, backend="synthetic", engine_settings=settings) as running:
        yield running


def posted(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def by_messages(http: httpx.Client, system: str, salt: dict[str, str]) -> Reused:
    turn = {"role": "user", "content": "Go."}
    marked = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    body = {"model": MODEL, "max_tokens": 2, "system": marked, "messages": [turn]}
    answer = posted(http, "/v1/messages", **body, **salt)
    reused = answer["holdfast"]["automatic_tokens"]
    return Reused(answer["id"], answer["usage"]["cache_read_input_tokens"] + reused)


def by_chat(http: httpx.Client, system: str, salt: dict[str, str]) -> Reused:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go."}]
    body = {"model": MODEL, "max_tokens": 2, "messages": messages}
    answer = posted(http, "/v1/chat/completions", **body, **salt)
    turn_id = f"msg_{answer['id'].removeprefix('chatcmpl-')}"
    return Reused(turn_id, answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def by_responses(http: httpx.Client, system: str, salt: dict[str, str]) -> Reused:
    body = {"model": MODEL, "max_output_tokens": 2, "instructions": system, "input": "Go."}
    answer = posted(http, "/v1/responses", **body, **salt)
    turn_id = f"msg_{answer['id'].removeprefix('resp_')}"
    return Reused(turn_id, answer["usage"]["input_tokens_details"]["cached_tokens"])


def by_generate_content(http: httpx.Client, system: str, salt: dict[str, str]) -> Reused:
    answer = posted(
        http,
        f"/v1beta/models/{MODEL}:generateContent",
        systemInstruction={"parts": [{"text": system}]},
        contents=[{"role": "user", "parts": [{"text": "Go."}]}],
        generationConfig={"maxOutputTokens": 2},
        **{camel(name): value for name, value in salt.items()},
    )
    reused = answer["holdfast"]["automatic_tokens"]
    read_tokens = answer["usageMetadata"].get("cachedContentTokenCount", 0)
    return Reused(answer["responseId"], read_tokens + reused)


APIS: tuple[Api, ...] = (by_messages, by_chat, by_responses, by_generate_content)


@pytest.mark.parametrize("api", APIS)
def test_a_salt_reads_what_it_wrote_and_nothing_else(fast: Stack, api: Api) -> None:
    system = f"{api.__name__}. {SYSTEM}"
    first = {"cache_salt": "team one"}
    with httpx.Client(base_url=fast.gateway, headers=API_HEADERS, timeout=300) as http:
        assert api(http, system, first).num_tokens == 0
        reread = api(http, system, first)
        assert reread.num_tokens > 1024
        other_salts: tuple[dict[str, str], ...] = ({"cache_salt": "team two"}, {})
        for foreign_salt in other_salts:
            assert api(http, system, foreign_salt).num_tokens == 0, foreign_salt
            assert api(http, system, foreign_salt).num_tokens == reread.num_tokens, foreign_salt
        # The other dialects read what this one wrote, with its salt.
        for another in APIS:
            assert another(http, system, first).num_tokens > 1024, another.__name__
    assert Admin(fast.gateway).recorded(reread.turn_id)["cache_read_tokens"] == reread.num_tokens


def test_a_salt_that_is_none_names_its_field_and_bound(fast: Stack) -> None:
    turn = {"role": "user", "content": "Go."}
    with httpx.Client(base_url=fast.gateway, headers=API_HEADERS, timeout=300) as http:
        for salt, bound in (("", "1"), ("x" * 1025, "1024"), (7, "str")):
            body = {"model": MODEL, "max_tokens": 1, "messages": [turn], "cache_salt": salt}
            for path in ("/v1/messages", "/v1/chat/completions"):
                refused = http.post(path, json=body)
                assert refused.status_code == 400, refused.text
                assert "cache_salt" in refused.text and bound in refused.text
