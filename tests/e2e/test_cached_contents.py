"""cachedContents through Google's SDK, on real engines and gateways that are restarted."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from scripts.stack import API_KEY, serving_gateway
from tests.e2e.fleet import running_fleet
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually, soon_after

MODEL = "synthetic"
RULES = "Rules of the house: nobody sleeps on the stairs. " * 150
LIFE = 1800
FAST = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "0"}


@contextmanager
def sdk_at(url: str, key: str = API_KEY) -> Iterator[genai.Client]:
    options = types.HttpOptions(
        base_url=url, timeout=300_000, retry_options=types.HttpRetryOptions(attempts=1)
    )
    with genai.Client(api_key=key, http_options=options) as client:
        yield client


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("caches")
    with running_fleet(data, settings=FAST) as fleet:
        yield fleet.gateway.url


@pytest.fixture
def sdk(url: str) -> Iterator[genai.Client]:
    with sdk_at(url) as client:
        yield client


def create(sdk: genai.Client, what: str, seconds: int = LIFE) -> types.CachedContent:
    return sdk.caches.create(
        model=MODEL,
        config=types.CreateCachedContentConfig(
            display_name=what,
            system_instruction=f"{what}: {RULES}",
            contents=[types.Content(role="user", parts=[types.Part(text="The first file.")])],
            ttl=f"{seconds}s",
        ),
    )


def ask(sdk: genai.Client, cached: str | None, text: str = "What?") -> Any:
    config = types.GenerateContentConfig(cached_content=cached, max_output_tokens=4)
    answer = sdk.models.generate_content(model=MODEL, contents=text, config=config)
    assert answer.usage_metadata is not None
    return answer


def leases(url: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = Admin(url).get("leases")
    return entries


def lease_of(url: str, name: str | None) -> list[dict[str, Any]]:
    return [lease for lease in leases(url) if lease["cached_content"] == name]


def test_a_cached_content_is_a_lease_with_name_and_time(sdk: genai.Client, url: str) -> None:
    content = create(sdk, "a lease")
    assert content.usage_metadata is not None and content.expire_time is not None
    time_left = content.expire_time - datetime.now(UTC)
    assert timedelta(seconds=LIFE - 120) < time_left <= timedelta(seconds=LIFE)
    [lease] = lease_of(url, content.name)
    assert lease["entry"]["state"] == "leased" and lease["workspace"] == "default"
    assert lease["entry"]["tokens"] == content.usage_metadata.total_token_count
    for number in range(2):
        usage = ask(sdk, content.name, f"Question {number}").usage_metadata
        assert usage.cached_content_token_count == content.usage_metadata.total_token_count
        assert usage.prompt_token_count > usage.cached_content_token_count
    # Reads do not prolong it: it ends when it was said to end, and not an hour later.
    [lease] = lease_of(url, content.name)
    assert lease["entry"]["expires_in_seconds"] <= LIFE
    assert lease["entry"]["has_own_lifetime"]


def test_contents_are_listed_and_found_by_their_workspace_only(sdk: genai.Client, url: str) -> None:
    names = {create(sdk, f"page {number}").name for number in range(3)}
    listed = list(sdk.caches.list(config={"page_size": 2}))
    assert names <= {content.name for content in listed}
    admin = Admin(url)
    admin.workspace("stranger")
    _, key = admin.make_key("stranger")
    with sdk_at(url, key) as stranger:
        assert list(stranger.caches.list()) == []
        for call in (stranger.caches.get, stranger.caches.delete):
            with pytest.raises(errors.ClientError) as caught:
                call(name=str(next(iter(names))))
            assert caught.value.status == "NOT_FOUND"
        with pytest.raises(errors.ClientError):
            ask(stranger, next(iter(names)))


def test_an_end_can_be_moved_both_ways(sdk: genai.Client, url: str) -> None:
    content = create(sdk, "moved")
    assert content.name is not None
    later = sdk.caches.update(name=content.name, config={"ttl": f"{2 * LIFE}s"})
    [lease] = lease_of(url, content.name)
    assert lease["entry"]["expires_in_seconds"] > LIFE + 300
    assert later.expire_time is not None and content.expire_time is not None
    assert later.expire_time > content.expire_time
    soon = soon_after(lambda: sdk.caches.get(name=str(content.name)), 1)
    name = lease["entry"]["name"]
    sdk.caches.update(name=content.name, config={"expire_time": soon})
    eventually(lambda: name not in [lease["entry"]["name"] for lease in leases(url)])
    with pytest.raises(errors.ClientError):
        sdk.caches.get(name=content.name)


def test_a_deletion_ends_the_lease_unless_another_content_has_the_same_prompt(
    sdk: genai.Client, url: str
) -> None:
    first = create(sdk, "twins")
    twin = create(sdk, "twins")
    [lease] = [lease for name in (first.name, twin.name) for lease in lease_of(url, name)]
    entry = lease["entry"]["name"]
    assert first.name is not None and twin.name is not None
    sdk.caches.delete(name=first.name)
    assert entry in [lease["entry"]["name"] for lease in leases(url)]
    assert ask(sdk, twin.name).usage_metadata.cached_content_token_count
    sdk.caches.delete(name=twin.name)
    assert entry not in [lease["entry"]["name"] for lease in leases(url)]
    with pytest.raises(errors.ClientError) as caught:
        ask(sdk, first.name)
    assert caught.value.status == "NOT_FOUND"


def test_what_is_billed_is_what_the_answers_say(sdk: genai.Client, url: str) -> None:
    content = create(sdk, "billed")
    answers = [ask(sdk, content.name), ask(sdk, content.name, "And then?")]
    for answer in answers:
        turn = Admin(url).recorded(answer.response_id)
        usage = answer.usage_metadata
        assert turn["cache_read_tokens"] == usage.cached_content_token_count
        written_tokens = turn["cache_write_5m_tokens"] + turn["cache_write_1h_tokens"]
        prompt_tokens = turn["input_tokens"] + written_tokens + turn["cache_read_tokens"]
        assert prompt_tokens == usage.prompt_token_count
        assert turn["output_tokens"] == usage.candidates_token_count


def test_what_can_not_be_cached_is_a_400_that_names_the_field(url: str) -> None:
    bare = {"systemInstruction": None}
    for field, body in (
        ("ttl", {"ttl": "5m"}),
        ("ttl", {"ttl": "0s"}),
        ("ttl", {"ttl": "9999999s"}),
        ("ttl", {"ttl": "60s", "expireTime": "2030-01-01T00:00:00Z"}),
        ("expireTime", {"expireTime": "tomorrow"}),
        ("expireTime", {"expireTime": "9999-12-31T23:59:59-12:00"}),
        ("contents", {"contents": [{"parts": [{"text": "short"}]}], **bare}),
        ("contents", {"contents": [], **bare}),
        ("model", {"model": ""}),
    ):
        content = {"model": f"models/{MODEL}", "systemInstruction": {"parts": [{"text": RULES}]}}
        headers = {"x-goog-api-key": API_KEY}
        path = f"{url}/v1beta/cachedContents"
        reply = httpx.post(path, json=content | body, headers=headers, timeout=120)
        assert reply.status_code == 400, (body, reply.text)
        violations, request = reply.json()["error"]["details"]
        assert violations["fieldViolations"][0]["field"] == field, body
        assert request["requestId"] == reply.headers["x-request-id"]


def test_a_request_can_not_change_what_is_cached(sdk: genai.Client) -> None:
    content = create(sdk, "unchanged")
    config = types.GenerateContentConfig(cached_content=content.name, system_instruction="Other.")
    with pytest.raises(errors.ClientError) as caught:
        sdk.models.generate_content(model=MODEL, contents="x", config=config)
    assert caught.value.code == 400


def test_restarts_lose_no_name_and_are_told_in_what_was_read(tmp_path: Path) -> None:
    with running_fleet(tmp_path, 1, 0, FAST) as fleet:

        @contextmanager
        def gateway() -> Iterator[tuple[genai.Client, str]]:
            with serving_gateway(tmp_path / "data", fleet.engines) as server:
                server.wait()
                with sdk_at(server.url) as sdk:
                    yield sdk, server.url

        with gateway() as (sdk, _):
            content = create(sdk, "restarts")
        assert content.name is not None and content.usage_metadata is not None
        tokens = content.usage_metadata.total_token_count
        with gateway() as (sdk, _):
            assert ask(sdk, content.name).usage_metadata.cached_content_token_count == tokens
        fleet.kill()
        fleet.restart()
        with gateway() as (sdk, url):
            assert sdk.caches.get(name=content.name).name == content.name
            assert ask(sdk, content.name).usage_metadata.cached_content_token_count is None
            [lease] = lease_of(url, content.name)
            assert 0 < lease["entry"]["expires_in_seconds"] <= LIFE
            read_tokens = ask(sdk, content.name, "Again?").usage_metadata.cached_content_token_count
            assert read_tokens == tokens
