"""Several requests on one connection, some of them wrong: each answer belongs to its request."""

import json
from collections.abc import Iterator

import pytest

from tests.gateway.bodies import body
from tests.gateway.serving import WAIT_SECONDS, eventually
from tests.wire.conftest import HASTY_SECONDS, Wire
from tests.wire.test_wire import GOOD, HIDDEN, chunked, length, request

TURN = request(length(GOOD), content=GOOD)
LAST_TURN = request(length(GOOD), "connection: close", content=GOOD)
WRONG: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "a coding": request("transfer-encoding: gzip, chunked", content=chunked(GOOD)),
    "a wrong body": request("transfer-encoding: chunked", content=b"zz\r\n"),
}


@pytest.fixture
def slow(wire: Wire) -> Iterator[Wire]:
    """An engine that is not done when the next request is there."""
    wire.engine.wait_seconds = 1.0
    yield wire
    wire.engine.wait_seconds = 0.0


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("num_before", [1, 2])
def test_a_wrong_request_is_refused_behind_earlier_answers(
    slow: Wire, kind: str, num_before: int
) -> None:
    """Or the refusal would be taken for the answer of the first, whose turn would end."""
    *answers, refusal = slow.replies(TURN * num_before + WRONG[kind])
    assert [reply.status for reply in answers] == [200] * num_before
    assert refusal.status == 400 and refusal.headers["connection"] == "close" and refusal.closed


def test_what_comes_behind_the_last_request_of_a_connection_is_not_read(slow: Wire) -> None:
    """RFC 9112, 9.6. It was a 400 in place of the turn's answer."""
    for behind in (HIDDEN, TURN, b"\r\n", b"\x16\x03\x01"):
        before = len(slow.engine.requests)
        (reply,) = slow.replies(LAST_TURN + behind)
        assert reply.status == 200 and reply.closed
        assert len(slow.engine.requests) == before + 1


def test_a_line_break_behind_a_body_does_not_end_the_turn(hasty: Wire) -> None:
    """Some old clients send one (RFC 9112, 2.2). It was taken for a head that does not go on."""
    hasty.engine.wait_seconds = 2 * HASTY_SECONDS
    with hasty.connect() as raw:
        raw.settimeout(WAIT_SECONDS)
        raw.sendall(TURN + b"\r\n")
        answer = b""
        while b'"end_turn"' not in answer and (piece := raw.recv(65536)):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"end_turn"' in answer


def test_what_is_sent_behind_a_wrong_request_is_bounded(wire: Wire) -> None:
    wire.engine.wait_seconds = 300.0
    try:
        assert wire.replies(TURN + WRONG["no HTTP"], b"x" * 1_000_000) == []
        eventually(lambda: not wire.engine.running)
    finally:
        wire.engine.wait_seconds = 0.0


def test_a_connect_ends_the_connection(wire: Wire) -> None:
    """A request behind it is not answered, and the client is told that none will be."""
    for target in ("x:443", "http://x/"):
        data = f"CONNECT {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        (reply,) = wire.replies(data + HIDDEN)
        assert reply.status == 400 and reply.headers["connection"] == "close"
        assert reply.error["message"] == "CONNECT: this is no proxy"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET http://gateway", 404),
        ("GET http://gateway?a=b", 404),
        ("GET HTTP://gateway:80/healthz", 200),
        ("OPTIONS *", 204),
        ("OPTIONS http://gateway", 204),
        ("OPTIONS http://gateway/v1/messages", 204),
        ("OPTIONS /*", 404),
        ("GET *", 400),
        ("GET ftp://gateway/healthz", 400),
        ("GET http://user@gateway/healthz", 400),
    ],
)
def test_a_request_target_is_a_path_or_a_url_and_of_options_also_a_star(
    wire: Wire, line: str, status: int
) -> None:
    """RFC 9112, 3.2. The path of a URL without one is `/`, which is not served."""
    head = f"{line} HTTP/1.1\r\nhost: gateway\r\n".encode()
    (reply,) = wire.replies(head + b"connection: close\r\n\r\n")
    assert reply.status == status
    if status == 204:
        of_all = "DELETE, GET, HEAD, OPTIONS, PATCH, POST"
        assert reply.headers["allow"] == ("OPTIONS, POST" if "/v1/" in line else of_all)
    if status == 404 and line.startswith("GET"):
        assert "described at /openapi.json" in reply.error["message"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_host_of_a_url_counts_and_not_the_header(wire: Wire, version: str) -> None:
    """RFC 9112, 3.2.2. Both URLs that this answer has begin with it."""
    host = "" if version == "1.0" else "host: other\r\n"
    rows = {"requests": [{"custom_id": "row", "params": body()}]}
    content = json.dumps(rows).encode()
    first = f"POST http://named:81/v1/messages/batches HTTP/{version}"
    data = request(length(content), "connection: close", content=content, first=first)
    (created,) = wire.replies(data.replace(b"host: gateway\r\n", host.encode()))[:1]
    batch = json.loads(created.body)
    path = f"/v1/messages/batches/{batch['id']}"

    def ended() -> bool:
        query = request("connection: close", first=f"GET http://named:81{path} HTTP/1.1")
        (reply,) = wire.replies(query.replace(b"host: gateway", b"host: other"))
        batch.update(json.loads(reply.body))
        return bool(batch["processing_status"] == "ended")

    eventually(ended)
    assert batch["results_url"] == f"http://named:81{path}/results"
