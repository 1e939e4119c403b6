"""Connections, unknown keys and bodies of some cost others nothing."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from gateway.base.errors import Overloaded, RateLimited
from gateway.http.connections import Connections, backlog_for, group_of, most_connections
from gateway.limits.bodies import BodyBytes
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, eventually, serve, serve_gateway

MOST, OF_ADDRESS, LOOKUPS = 40, 30, 10


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    data, engine = tmp_path_factory.mktemp("small"), ScriptedEngine()
    bounds = {
        "connections": MOST,
        "connections_per_address": OF_ADDRESS,
        "key_lookups_per_minute": LOOKUPS,
        "bodies_bytes": 1 << 20,
    }
    with serve(engine) as engine_url, serve_gateway(data, engine_url, **bounds) as url:
        stack = Stack(url, engine, data)
        eventually(stack.is_ready)
        yield stack


@contextmanager
def sockets(url: str, count: int, source: str) -> Iterator[list[socket.socket]]:
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection((host, int(port)), 30, source_address=(source, 0))
            )
            for _ in range(count)
        ]


def test_idle_sockets_without_a_key_keep_nobody_out(small: Stack) -> None:
    with small.http() as known:
        assert known.post("/v1/messages", json=body()).status_code == 200
        with sockets(small.url, MOST, "127.0.0.2"), sockets(small.url, MOST, "127.0.0.3"):
            for _ in range(5):
                with small.http() as http:
                    assert http.post("/v1/messages", json=body()).status_code == 200
            # The connection on which a key was shown was not the one that made way.
            connection = known._transport._pool.connections[0]  # type: ignore[attr-defined]
            assert known.post("/v1/messages", json=body()).status_code == 200
            assert connection in known._transport._pool.connections  # type: ignore[attr-defined]


def test_where_none_can_make_way_a_connection_is_refused_and_closed(small: Stack) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {API_KEY}\r\n\r\n".encode()
    answer = b""
    with ExitStack() as known:
        # Other tests' connections may still count: until one is refused. What a refused connection
        # is told is lost where something was sent on it, so the next one says nothing.
        for _ in range(MOST + 1):
            (one,) = known.enter_context(sockets(small.url, 1, "127.0.0.2"))
            if _is_served(one, head):
                continue
            (next_one,) = known.enter_context(sockets(small.url, 1, "127.0.0.2"))
            if answer := _refusal_of(next_one, head):
                break
    assert answer.startswith(b"HTTP/1.1 503")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error == {"type": "overloaded_error", "message": "too many connections"}
    eventually(small.is_ready)


def _is_served(connection: socket.socket, head: bytes) -> bool:
    connection.settimeout(120)
    try:
        connection.sendall(head)
        return connection.recv(4096).startswith(b"HTTP/1.1 200")
    except (BrokenPipeError, ConnectionResetError):
        return False


def _refusal_of(connection: socket.socket, head: bytes) -> bytes:
    """What is said before anything was sent, or nothing where the connection may stay."""
    connection.settimeout(3)
    try:
        answer = connection.recv(4096)
    except TimeoutError:
        # It may stay; else what it is told later is lost, since something was sent on it.
        _is_served(connection, head)
        return b""
    connection.settimeout(120)
    while piece := connection.recv(4096):
        answer += piece
    return answer


class Guest:
    is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True


def test_one_address_evicts_its_own_oldest_connection_without_a_valid_key_only() -> None:
    connections = Connections(most=10, most_of_address=2)
    proved, old, other, newcomer = guests = Guest(), Guest(), Guest(), Guest()
    assert connections.enter(other, "2001:db8::1")
    assert connections.enter(proved, "2001:db8:1::1")
    connections.prove(proved)
    assert connections.enter(old, "2001:db8:1::2") and connections.enter(newcomer, "2001:db8:1::3")
    assert connections.enter(Guest(), "2001:db8:1::4")
    assert [guest.is_evicted for guest in guests] == [False, True, False, False]
    connections.doubt(proved)  # a wrong key came behind the valid one
    assert connections.enter(Guest(), "2001:db8:1::5")
    assert newcomer.is_evicted and not proved.is_evicted
    for guest in guests:
        connections.leave(guest)
    assert len(connections) == 2


def test_where_all_have_valid_keys_a_newcomer_is_refused() -> None:
    connections = Connections(most=1, most_of_address=1)
    proved = Guest()
    assert connections.enter(proved, "10.0.0.1")
    connections.prove(proved)
    assert not connections.enter(Guest(), "10.0.0.1") and not proved.is_evicted


@pytest.mark.parametrize("key", ["", "x-api-key: hf-wrong\r\n"])
@pytest.mark.parametrize("path", ["/v1/messages", "/nowhere"])
def test_bodies_that_never_end_of_clients_without_a_key_cost_a_keyed_one_no_turn(
    small: Stack, path: str, key: str
) -> None:
    """They were never idle, so none made way, and the keyed client got a 503."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{key}content-length: 100\r\n\r\n{{".encode()
    with ExitStack() as stack:
        for _ in range(4):
            for one in stack.enter_context(sockets(small.url, MOST, "127.0.0.1")):
                with suppress(ConnectionError):
                    one.sendall(head)
            with small.http() as http:
                assert http.post("/v1/messages", json=body()).status_code == 200


def test_descriptors_are_left_for_everything_else() -> None:
    assert most_connections(10_000, 1024) == 768 and most_connections(100, 1024) == 100
    assert backlog_for(1024) == 128, "as many are accepted before the first is refused"
    assert group_of("10.0.0.1") == "10.0.0.1"


def test_unknown_keys_of_one_address_are_looked_up_at_a_rate(small: Stack) -> None:
    made = Admin(small.url).make_key("default")[1]
    with small.http(made) as http:
        assert http.get("/v1/models").status_code == 200, "a new key works at once"
    answers = []
    for number in range(3 * LOOKUPS):
        with small.http(f"hf-wrong-{number}") as http:
            answers.append(http.get("/v1/models"))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {401, 429} and codes.count(401) <= 2 * LOOKUPS
    limited = next(answer for answer in answers if answer.status_code == 429)
    assert int(limited.headers["retry-after"]) > 0 and "unknown API keys" in limited.text
    with small.http() as http:
        assert http.get("/v1/models").status_code == 200, "keys in memory work on"
    late = Admin(small.url).make_key("default")[1]

    def works() -> bool:
        with small.http(late) as http:
            return http.get("/v1/models").status_code == 200

    began = time.monotonic()
    eventually(works)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("key", [f"{API_KEY}  ", f"\t{API_KEY}", f" {API_KEY}\t "])
def test_blanks_around_a_key_are_no_part_of_it(small: Stack, key: str) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key:{key}\r\n\r\n".encode()
    with sockets(small.url, 1, "127.0.0.1") as (one,):
        one.sendall(head)
        assert one.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_workspace_holds_as_many_bytes_as_are_left() -> None:
    bodies = BodyBytes(100)
    bodies.take("a", 40)
    with pytest.raises(RateLimited, match="60 bytes of requests held"):
        bodies.take("a", 30)
    bodies.take("b", 30)
    with pytest.raises(RateLimited):
        bodies.take("b", 10)
    bodies.take("c", 30)
    with pytest.raises(Overloaded):
        bodies.take("d", 1)
    bodies.give_back("a", 40)
    bodies.take("d", 10)
    for workspace, held in (("b", 30), ("c", 30), ("d", 10)):
        bodies.give_back(workspace, held)
    assert bodies.total == 0


def test_bodies_beyond_the_total_are_refused_before_they_are_read(small: Stack) -> None:
    long = body(messages=[{"role": "user", "content": "x" * 700_000}])
    small.engine.wait_seconds = 20.0
    try:
        with small.http() as first, small.http() as second:
            with first.stream("POST", "/v1/messages", json={**long, "stream": True}) as held:
                assert held.status_code == 200
                answer = second.post("/v1/messages", json=long)
                assert answer.status_code == 529, answer.text
                assert "too many bytes" in answer.text and answer.headers["retry-after"] == "2"
    finally:
        small.engine.wait_seconds = 0.0

    def is_served() -> bool:
        with small.http() as http:
            return http.post("/v1/messages", json=long).status_code == 200

    eventually(is_served)
