"""Connections, unknown keys, bodies, counts and what is kept of some cost others nothing."""

import base64
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.asgi import raise_descriptor_limit
from engine.backends.base import HEARTBEAT_SECONDS
from engine.places import Connections
from gateway.admission import rates
from gateway.http.batch_runner import BATCH_BYTES, ROW_BYTES
from gateway.routing import engine
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack, stacked
from tests.gateway.gemini_bodies import MODEL
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, eventually

MOST = 40
OF_ADDRESS = 30
LOOKUPS = 10
SILENCE_SECONDS = 2.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    bounds = {
        "connections": MOST,
        "connections_per_address": OF_ADDRESS,
        "key_lookups_per_minute": LOOKUPS,
        "bodies_bytes": 1 << 20,
    }
    with stacked(tmp_path_factory.mktemp("small"), **bounds) as stack:
        yield stack


@contextmanager
def sockets(url: str, count: int, source: str) -> Iterator[list[socket.socket]]:
    host, port = url.removeprefix("http://").split(":")
    address = (host, int(port))
    source_address = (source, 0)
    with ExitStack() as stack:
        connections = [
            socket.create_connection(address, 30, source_address=source_address)
            for _ in range(count)
        ]
        yield [stack.enter_context(connection) for connection in connections]


def proving(key: str) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n".encode()


def test_where_each_key_has_one_place_a_newcomer_is_answered(small: Stack) -> None:
    """Nobody has more than an equal part, so what makes way is no keyed connection's."""
    admin = Admin(small.url)
    keys = [admin.make_key("default")[1] for _ in range(MOST + 1)]
    with ExitStack() as known:
        raws = []
        for key in keys:
            (raw,) = known.enter_context(sockets(small.url, 1, "127.0.0.2"))
            assert _answer_to(raw, proving(key)).startswith(b"HTTP/1.1 200")
            raws.append(raw)
        for _ in range(2 * MOST):
            known.enter_context(sockets(small.url, 1, "127.0.0.3"))
        assert _answer_to(raws[0], proving(keys[0])).startswith(b"HTTP/1.1 200")
    eventually(small.is_ready)


def _answer_to(connection: socket.socket, head: bytes) -> bytes:
    """All that is said where the connection ends, else the first part of it."""
    connection.settimeout(120)
    connection.sendall(head)
    answer = connection.recv(4096)
    while answer.startswith(b"HTTP/1.1 503") and (piece := connection.recv(4096)):
        answer += piece
    return answer


def test_one_key_that_holds_all_places_keeps_nobody_out(small: Stack) -> None:
    """16,500 connections of one valid key were `503 too many connections` for everybody."""
    admin = Admin(small.url)
    first_key, second_key = (admin.make_key("default")[1] for _ in range(2))
    with ExitStack() as exits:
        for _ in range(3 * MOST):
            (raw,) = exits.enter_context(sockets(small.url, 1, "127.0.0.2"))
            # The key's own newest connections make way, and are told so or served.
            assert _answer_to(raw, proving(first_key)).startswith(
                (b"HTTP/1.1 200", b"HTTP/1.1 503")
            )
            (newcomer,) = exits.enter_context(sockets(small.url, 1, "127.0.0.3"))
            assert _answer_to(newcomer, proving(second_key)).startswith(b"HTTP/1.1 200")
            newcomer.close()


class Guest:
    is_evicted = False
    is_inside = False

    def evict(self) -> None:
        self.is_evicted = True
        self.is_inside = False


def test_one_address_evicts_its_own_oldest_connection_without_a_valid_key_only() -> None:
    connections = Connections(most=10, most_of_address=2, part_of_holder=0.5)
    guests = [Guest() for _ in range(4)]
    proved, old, neighbour, newcomer = guests
    assert connections.enter(neighbour, "2001:db8::1")
    assert connections.enter(proved, "2001:db8:1::1")
    connections.prove(proved, "key")
    assert connections.enter(old, "2001:db8:1::2") and connections.enter(newcomer, "2001:db8:1::3")
    assert connections.enter(Guest(), "2001:db8:1::4")
    assert [guest.is_evicted for guest in guests] == [False, True, False, False]
    connections.doubt(proved)  # a wrong key came behind the valid one
    assert connections.enter(Guest(), "2001:db8:1::5")
    assert newcomer.is_evicted and not proved.is_evicted
    for guest in guests:
        connections.leave(guest)
    assert len(connections) == 2
    full = Connections(most=1, most_of_address=1, part_of_holder=0.5)
    assert full.enter(proved, "10.0.0.1")
    full.prove(proved, "key")
    assert not full.enter(Guest(), "10.0.0.1") and not proved.is_evicted


def proved_of(connections: Connections, key: str, count: int) -> list[Guest]:
    """So many connections of a key, as far as there is room for them."""
    guests = [Guest() for _ in range(count)]
    for number, guest in enumerate(guests):
        assert connections.enter(guest, f"10.0.{len(connections)}.{number}")
        connections.prove(guest, key)
    return guests


def test_the_newest_of_the_key_that_has_the_most_makes_way_for_another_key() -> None:
    """One of nine places is for newcomers."""
    connections = Connections(most=9, most_of_address=9, part_of_holder=0.5)
    many = proved_of(connections, "many", 4)
    few = proved_of(connections, "few", 2)
    second_pair = proved_of(connections, "other", 2)
    (newcomer,) = proved_of(connections, "new", 1)
    assert [guest.is_evicted for guest in many] == [False, False, False, True]
    (beyond,) = proved_of(connections, "new", 1)
    assert many[2].is_evicted
    # Each key has two, which is an equal part. A third one of the newcomer's is as one without.
    (third,) = proved_of(connections, "new", 1)
    assert connections.enter(Guest(), "10.0.0.4") and third.is_evicted
    assert not any(guest.is_evicted for guest in [*many[:2], *few, *second_pair, newcomer, beyond])


def test_connections_without_a_key_take_no_place_of_one_with_a_key() -> None:
    """Where all were proved, each newcomer evicted one that was, whether it showed a key or not."""
    connections = Connections(most=32, most_of_address=32, part_of_holder=0.5)
    keyed = [guest for key in "ab" for guest in proved_of(connections, key, 16)]
    for _ in range(100):
        assert connections.enter(Guest(), "10.9.9.9")
    assert sum(guest.is_evicted for guest in keyed) == 2, "those beyond what may be proved"
    for key in "cdef":
        (newcomer,) = proved_of(connections, key, 1)
        assert connections.enter(Guest(), "10.9.9.9") and not newcomer.is_evicted


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 11), st.integers(0, 3)), max_size=200
    )
)
def test_places_are_counted_whatever_comes_and_goes(steps: list[tuple[int, int, int]]) -> None:
    connections = Connections(most=6, most_of_address=4, part_of_holder=0.5)
    guests = [Guest() for _ in range(12)]
    for step, number, whose in steps:
        guest = guests[number]
        match step:
            case 0 if not guest.is_inside:
                guest.is_inside = connections.enter(guest, f"10.0.0.{whose}")
            case 1:
                connections.prove(guest, f"key {whose}")
            case 2:
                connections.doubt(guest)
            case 3:
                connections.leave(guest)
                guest.is_inside = False
        assert len(connections) == sum(guest.is_inside for guest in guests) <= 6
    for guest in guests:
        connections.leave(guest)
    assert not len(connections)


@pytest.mark.parametrize("key", ["", "x-api-key: hf-wrong\r\n"])
@pytest.mark.parametrize("path", ["/v1/messages", "/nowhere"])
def test_bodies_that_never_end_of_clients_without_a_key_cost_a_keyed_one_no_turn(
    small: Stack, path: str, key: str
) -> None:
    """They were never idle, so none made way, and the keyed client got a 503."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{key}content-length: 100\r\n\r\n{{".encode()
    with ExitStack() as stack:
        for _ in range(4):
            for connection in stack.enter_context(sockets(small.url, MOST, "127.0.0.1")):
                with suppress(ConnectionError):
                    connection.sendall(head)
            assert small.post("/v1/messages", json=body()).status_code == 200


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_600_connections_without_a_key_cost_a_keyed_client_no_turn_and_a_probe_no_answer(
    shared: Stack, source: str
) -> None:
    """Behind a proxy all have one address. They open anew what was closed, as an attacker does."""
    head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    raise_descriptor_limit()
    with shared.http() as known, ExitStack() as stack:
        for _ in range(3):
            for connection in stack.enter_context(sockets(shared.url, 600, source)):
                with suppress(ConnectionError):
                    connection.sendall(head)
            for _ in range(16):
                assert known.post("/v1/messages", json=body()).status_code == 200
                assert shared.post("/v1/messages", json=body()).status_code == 200
                assert shared.get("/readyz").status_code == 200


def test_unknown_keys_of_one_address_are_looked_up_at_a_rate(small: Stack) -> None:

    def answer(key: str = API_KEY) -> httpx.Response:
        # From an address of its own: other tests have tried keys from the usual one.
        transport = httpx.HTTPTransport(local_address="127.0.0.9")
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        with httpx.Client(transport=transport, headers=headers, timeout=120) as http:
            return http.get(f"{small.url}/v1/models")

    admin = Admin(small.url)
    assert answer(admin.make_key("default")[1]).status_code == 200, "a new key works at once"
    answers = [answer(f"hf-wrong-{number}") for number in range(3 * LOOKUPS)]
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {401, 429} and codes.count(401) <= 2 * LOOKUPS
    limited = answers[codes.index(429)]
    assert int(limited.headers["retry-after"]) > 0 and "unknown API keys" in limited.text
    assert answer().status_code == 200, "keys in memory work on"
    late = admin.make_key("default")[1]
    eventually(lambda: answer(late).status_code == 200, 60)


@pytest.mark.parametrize("key", [f"{API_KEY}  ", f"\t{API_KEY}", f" {API_KEY}\t "])
def test_blanks_around_a_key_are_no_part_of_it(small: Stack, key: str) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key:{key}\r\n\r\n".encode()
    with sockets(small.url, 1, "127.0.0.1") as (connection,):
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_bodies_beyond_the_total_are_refused_before_they_are_read(small: Stack) -> None:
    long = body(messages=[{"role": "user", "content": "x" * 700_000}])
    small.engine.wait_seconds = 20.0
    try:
        with small.http() as first, small.http() as second:
            with first.stream("POST", "/v1/messages", json={**long, "stream": True}) as streamed:
                assert streamed.status_code == 200
                answer = second.post("/v1/messages", json=long)
                assert answer.status_code == 529, answer.text
                assert "too many bytes" in answer.text and answer.headers["retry-after"] == "2"
    finally:
        small.engine.wait_seconds = 0.0

    eventually(lambda: small.post("/v1/messages", json=long).status_code == 200)


COUNTED: Any = {name: value for name, value in body().items() if name != "max_tokens"}


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Stack]:
    bounds = {"count_requests_per_minute": 5, "count_concurrency": 2}
    with stacked(tmp_path, **bounds) as stack:
        yield stack


@contextmanager
def asking(url: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request and read no answer; the connection is closed at the end of the context."""
    headers = {
        "x-api-key": API_KEY,
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
    }
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=120)) as connection:
        connection.request("POST", path, json.dumps(body), headers)
        yield


def test_counting_has_a_rate_of_its_own(counted: Stack) -> None:
    with counted.sdk() as sdk:
        for _ in range(5):
            assert sdk.messages.count_tokens(**COUNTED).input_tokens > 0
        with pytest.raises(anthropic.RateLimitError, match="5 calls of count_tokens per") as caught:
            sdk.messages.count_tokens(**COUNTED)
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert sdk.messages.create(**COUNTED, max_tokens=1).usage.input_tokens > 0


def test_a_workspace_counts_a_few_at_once_and_who_leaves_ends_its_count(counted: Stack) -> None:
    counted.engine.count_seconds = 60.0
    path = "/v1/messages/count_tokens"
    with asking(counted.url, path, COUNTED), asking(counted.url, path, COUNTED):
        eventually(lambda: counted.engine.num_counting == 2)
        refused = counted.post(path, json=COUNTED)
    assert refused.status_code == 429 and "2 concurrent calls" in refused.text
    eventually(lambda: counted.engine.num_counting == 0)
    counted.engine.count_seconds = 0.0
    assert counted.post(path, json=COUNTED).status_code == 200


def test_a_prompt_that_can_not_fit_is_refused_without_the_engine(counted: Stack) -> None:
    counted.engine.longest_token_bytes = 8
    counted.engine.epoch = "epoch-2"
    # 1 MB; the context is 100,000 tokens of 8 bytes at most.
    too_long = {**COUNTED, "messages": [{"role": "user", "content": "word " * 200_000}]}

    def answer(path: str, **changes: Any) -> httpx.Response:
        return counted.post(path, json={**too_long, **changes})

    eventually(lambda: answer("/v1/messages", max_tokens=1).status_code == 400)
    counted.engine.requests.clear()
    before = counted.engine.num_counts
    for refused in (
        answer("/v1/messages", max_tokens=1),
        answer("/v1/messages/count_tokens"),
        answer("/v1/chat/completions"),
    ):
        assert refused.status_code == 400, refused.text
        assert "125000 tokens" in refused.text and "100000" in refused.text
    assert not counted.engine.requests and counted.engine.num_counts == before
    # Blanks may be cut off by a template: they are not counted.
    blank = [{"role": "user", "content": "word" + " " * 1_000_000}]
    assert answer("/v1/messages", max_tokens=1, messages=blank).status_code == 200


def test_a_silent_engine_is_followed_by_one_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may hang; what an engine can't cope with must not visit all of them."""
    assert engine.STREAM_TIMEOUTS.read_seconds > 3 * HEARTBEAT_SECONDS
    silence = engine.STREAM_TIMEOUTS._replace(read_seconds=SILENCE_SECONDS)
    monkeypatch.setattr(engine, "STREAM_TIMEOUTS", silence)
    engines = [ScriptedEngine(is_mute=True) for _ in range(3)]
    with stacked(tmp_path, *engines) as stack:
        answer = stack.post("/v1/messages", json=body())
        assert answer.status_code == 529, answer.text
        assert int(answer.headers["retry-after"]) > 0
        assert sum(len(engine.requests) for engine in engines) == 2


MEBIBYTE = 1 << 20
NUM_KEPT_BYTES = 3 * MEBIBYTE


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    bounds = {
        # The content may come once a minute.
        "large_body_bytes_per_minute": NUM_KEPT_BYTES + MEBIBYTE // 8,
        "batch_bytes": 2 * (BATCH_BYTES + 10 * ROW_BYTES + 10),
    }
    with stacked(tmp_path_factory.mktemp("strict"), **bounds) as stack:
        yield stack


def test_a_large_cached_content_counts_against_the_rate_of_large_bodies_at_each_use(
    strict: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 100 bytes that names it costs as much as one that sends it."""
    monkeypatch.setattr(rates, "MAX_WAIT_SECONDS", 0.1)
    data = base64.b64encode(os.urandom(NUM_KEPT_BYTES * 3 // 4)).decode()
    image = {"inlineData": {"mimeType": "image/png", "data": data}}
    parts = [{"text": "Rules. " * 400}, image]
    content = {"model": f"models/{MODEL}", "contents": [{"role": "user", "parts": parts}]}
    with strict.http() as http:
        created = http.post("/v1beta/cachedContents", json=content)
        assert created.status_code == 200, created.text
        name = created.json()["name"]
        request = {"contents": [{"parts": [{"text": "And?"}]}], "cachedContent": name}
        path = f"/v1beta/models/{MODEL}"
        for late in (
            http.post(f"{path}:generateContent", json=request),
            http.post(f"{path}:countTokens", json={"generateContentRequest": request}),
            http.patch(f"/v1beta/{name}", json={"ttl": "7200s"}),
        ):
            assert late.status_code == 429, late.text
            assert "bytes of bodies" in late.json()["error"]["message"]
            assert int(late.headers["retry-after"]) > 0
        small = http.post(f"{path}:generateContent", json={"contents": request["contents"]})
        assert small.status_code == 200, "what does not name it goes on"


def test_rows_of_a_few_bytes_count_what_they_take_in_the_database(strict: Stack) -> None:
    rows = [{"custom_id": f"r{number}", "params": 0} for number in range(10)]
    replies = [strict.post("/v1/messages/batches", json={"requests": rows}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert "bytes of batches" in replies[-1].json()["error"]["message"]
