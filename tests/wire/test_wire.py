"""Bytes that no client library would send (F9): one answer, the right one, and no second request.

What a proxy in front might understand otherwise than we do (request smuggling) is refused, and the
connection closed, so that nothing behind it is ever taken for a request.
"""

import json
import socket
import time
import zlib
from contextlib import suppress
from typing import Any

import httpx
import pytest

from engine.reading import FRAMING_TOLD, MAX_HEAD_BYTES, MAX_HEADERS
from tests.gateway.bodies import body
from tests.gateway.serving import API_KEY, eventually, metric
from tests.wire.conftest import BODY_LIMIT, WAIT_SECONDS, Reply, Wire, read_replies

GOOD = json.dumps(body()).encode()
FIRST = "POST /v1/messages HTTP/1.1"
BASE = (
    "host: gateway",
    f"x-api-key: {API_KEY}",
    "anthropic-version: 2023-06-01",
    "content-type: application/json",
)
# What a smuggler hides behind the first request's body.
HIDDEN = b"GET /healthz HTTP/1.1\r\nhost: gateway\r\n\r\n"
# Ends a connection that goes on, so that nobody has to wait for its silence.
LAST = HIDDEN[:-2] + b"connection: close\r\n\r\n"


def request(*headers: str, content: bytes = b"", first: str = FIRST, eol: str = "\r\n") -> bytes:
    return eol.join([first, *BASE, *headers, "", ""]).encode("latin-1") + content


def length(content: bytes) -> str:
    return f"content-length: {len(content)}"


def chunked(content: bytes, extension: str = "") -> bytes:
    return f"{len(content):x}{extension}\r\n".encode() + content + b"\r\n0\r\n\r\n"


MALFORMED: dict[str, bytes] = {
    "cl_te": request(length(chunked(GOOD)), "transfer-encoding: chunked", content=chunked(GOOD)),
    "te_cl": request("transfer-encoding: chunked", length(b"0\r\n\r\n"), content=b"0\r\n\r\n"),
    "te_te": request(
        "transfer-encoding: chunked", "transfer-encoding: identity", content=chunked(GOOD)
    ),
    "te_obfuscated": request("transfer-encoding: xchunked", content=chunked(GOOD)),
    "te_twice_in_one": request("transfer-encoding: chunked, identity", content=GOOD),
    "te_gzip_chunked": request("transfer-encoding: gzip, chunked", content=chunked(GOOD)),
    "te_gzip_and_te_chunked": request(
        "transfer-encoding: gzip", "transfer-encoding: chunked", content=chunked(GOOD)
    ),
    "te_without_a_length": request("transfer-encoding: identity", content=GOOD),
    "te_empty_element": request("transfer-encoding: , chunked", content=chunked(GOOD)),
    "te_of_http_1_0": request(
        "transfer-encoding: chunked", content=chunked(GOOD), first=FIRST[:-1] + "0"
    ),
    "te_space_before_colon": request("transfer-encoding : chunked", content=chunked(GOOD)),
    "cl_twice": request(length(GOOD), length(GOOD + b"x"), content=GOOD),
    "cl_plus": request(f"content-length: +{len(GOOD)}", content=GOOD),
    "cl_minus": request("content-length: -1", content=GOOD),
    "cl_hex": request(f"content-length: {len(GOOD):#x}", content=GOOD),
    "cl_list": request(f"content-length: {len(GOOD)}, {len(GOOD)}", content=GOOD),
    "cl_too_big_for_64_bits": request(f"content-length: {10**30}", content=GOOD),
    "bare_lf": request(length(GOOD), content=GOOD, eol="\n"),
    "bare_lf_in_a_header": request("x-a: b\nx-c: d", length(GOOD), content=GOOD),
    "bare_cr_in_a_header": request("x-a: b\rx-c: d", length(GOOD), content=GOOD),
    "obs_fold": request("x-a: b\r\n c", length(GOOD), content=GOOD),
    "nul_in_a_header": request("x-a: b\x00c", length(GOOD), content=GOOD),
    "space_in_a_name": request("x a: b", length(GOOD), content=GOOD),
    "no_name": request(": b", length(GOOD), content=GOOD),
    "chunk_size_no_number": request(
        "transfer-encoding: chunked", content=b"zz\r\n" + GOOD + b"\r\n0\r\n\r\n"
    ),
    "chunk_size_overflows": request(
        "transfer-encoding: chunked", content=b"f" * 17 + b"\r\n" + GOOD
    ),
    "chunk_longer_than_said": request(
        "transfer-encoding: chunked", content=b"4\r\n" + GOOD + b"\r\n0\r\n\r\n"
    ),
    "no_http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    "http_2_preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no_host": request(length(GOOD), content=GOOD).replace(b"host: gateway\r\n", b""),
    "two_hosts": request("host: other", length(GOOD), content=GOOD),
    "the_same_host_twice": request("Host: gateway", length(GOOD), content=GOOD),
    "two_hosts_of_http_1_0": request(
        "host: other", length(GOOD), content=GOOD, first=FIRST[:-1] + "0"
    ),
    "http_0_9": b"GET /v1/models\r\n\r\n",
    "http_2_0": request(length(GOOD), content=GOOD, first=FIRST[:-3] + "2.0"),
    "unknown_version": request(length(GOOD), content=GOOD, first=FIRST[:-3] + "9.9"),
    "url_with_a_space": request(length(GOOD), content=GOOD, first="POST /v1/ m HTTP/1.1"),
    **{
        f"host_{number}": request(length(GOOD), content=GOOD).replace(b"gateway", host)
        for number, host in enumerate((b"a/b", b"a b", b"a, b", b"u@a", b"a:b", b"[::1", b"a?b"))
    },
}
TOO_LARGE: dict[str, bytes] = {
    "10k_headers": request(*(f"x-{n}: 1" for n in range(10_000)), length(GOOD), content=GOOD),
    "one_header_too_many": request(
        *(f"x-{n}: 1" for n in range(MAX_HEADERS)), length(GOOD), content=GOOD
    ),
    "100_kb_header": request(f"x-a: {'b' * 100_000}", length(GOOD), content=GOOD),
    "endless_header": request()[:-2] + b"x-a: " + b"b" * 2_000_000,
    "endless_url": f"POST /{'v' * 2_000_000}".encode(),
    "endless_trailer": request(
        "transfer-encoding: chunked", content=b"0\r\nx-a: " + b"b" * 2_000_000
    ),
    "10k_trailers": request(
        "transfer-encoding: chunked",
        content=b"0\r\n" + b"".join(b"x-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
    ),
    "endless_line_breaks": b"\r\n" * 200_000,
}
CASES = {name: (data, 400) for name, data in MALFORMED.items()}
CASES |= {name: (data, 431) for name, data in TOO_LARGE.items()}


def check_envelope(reply: Reply, status: int) -> None:
    assert reply.status == status, reply
    assert reply.error["type"] == "invalid_request_error" and reply.error["message"]
    assert json.loads(reply.body)["request_id"] == reply.headers["request-id"]


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_plain_http_gets_one_answer_and_an_end(wire: Wire, name: str) -> None:
    data, status = CASES[name]
    before = len(wire.engine.requests)
    (reply,) = wire.replies(data + HIDDEN)
    check_envelope(reply, status)
    assert reply.closed and reply.headers["connection"] == "close"
    assert len(wire.engine.requests) == before


OPENAI = "POST /v1/chat/completions HTTP/1.1"


def test_the_answer_without_a_route_is_in_the_paths_dialect(wire: Wire) -> None:
    data = request(*(f"x-{n}: 1" for n in range(500)), length(GOOD), content=GOOD, first=OPENAI)
    (reply,) = wire.replies(data)
    assert reply.status == 431 and set(json.loads(reply.body)) == {"error"}
    assert set(reply.error) == {"message", "type", "param", "code", "request_id"}
    assert reply.headers["x-request-id"] == reply.error["request_id"]
    assert reply.error["request_id"].startswith("req_")


def test_what_is_unusual_but_right_is_served(wire: Wire) -> None:
    """So that the cases above fail for what is wrong with them."""
    fine = [
        request(length(GOOD), content=GOOD),
        request("transfer-encoding: chunked", content=chunked(GOOD)),
        request("transfer-encoding: chunked", content=chunked(GOOD, ";name=value")),
        request("Transfer-Encoding: CHUNKED", content=chunked(GOOD)[:-2] + b"x-t: 1\r\n\r\n"),
        request(*(f"x-{n}: 1" for n in range(100)), length(GOOD), content=GOOD),
        request(f"x-a: {'b' * (MAX_HEAD_BYTES // 2)}", length(GOOD), content=GOOD),
        request("expect: 100-continue", length(GOOD), content=GOOD, first=FIRST),
        *(
            request(length(GOOD), content=GOOD).replace(b"host: gateway", b"Host: " + host)
            for host in (b"", b"a_b.c:8080", b"127.0.0.1:", b"[::1]:80", b"xn--bcher-kva.example")
        ),
        request(length(GOOD), content=GOOD, first="POST http://any/v1/messages HTTP/1.1"),
    ]
    for data in fine:
        *interim, reply, last = wire.replies(data + LAST)
        assert reply.status == 200 and all(r.status == 100 for r in interim), (data, reply)
        assert json.loads(last.body) == {"status": "ok"}, "the connection goes on"
    replies = wire.replies(fine[0] + fine[1] + LAST)
    assert [reply.status for reply in replies] == [200] * 3, "pipelined requests are as many"


def test_a_trailer_never_becomes_a_header(wire: Wire) -> None:
    """Or it would carry past a proxy what that takes from the headers."""
    data = request("transfer-encoding: chunked", "connection: close", content=chunked(GOOD))
    key = f"x-api-key: {API_KEY}\r\n"
    (reply,) = wire.replies(data.replace(key.encode(), b"")[:-2] + key.encode() + b"\r\n")
    assert reply.status == 401


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_413(wire: Wire, is_chunked: bool) -> None:
    content = json.dumps(body(system="x" * 20 * BODY_LIMIT)).encode()
    how = "transfer-encoding: chunked" if is_chunked else length(content)
    content = chunked(content) if is_chunked else content
    data = request(how, "connection: close", content=content)
    reply = wire.replies(data)[0]
    assert reply.status == 413 and reply.error["type"] == "request_too_large"


def test_a_compressed_body_is_415_and_is_not_unpacked(wire: Wire) -> None:
    bomb = zlib.compress(b" " * 40_000_000, 9, wbits=31)
    assert len(bomb) < BODY_LIMIT
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, identity"):
        headers = (f"content-encoding: {encoding}", "connection: close", length(bomb))
        data = request(*headers, content=bomb)
        check_envelope(wire.replies(data)[0], 415)


def endless(wire: Wire, head: bytes, piece: bytes) -> list[Reply]:
    """Send the piece again and again until the gateway ends the connection; what it said."""
    with wire.connect() as raw:
        raw.settimeout(1)
        deadline = time.monotonic() + WAIT_SECONDS
        with suppress(ConnectionError):
            raw.sendall(head)
            while True:
                assert time.monotonic() < deadline, "it was never cut off"
                with suppress(TimeoutError):
                    raw.sendall(piece)
        return read_replies(raw)


CHUNKED = "transfer-encoding: chunked"
FRAMES = {
    "chunks of a byte": b"1\r\n \r\n" * 1000,
    "extensions": b"1;" + b"e" * 60_000 + b"\r\n \r\n",
    "names and values": b"1" + b";a=b" * 100 + b"\r\n \r\n",
    "zeros before the length": b"0" * 15 + b"1\r\n \r\n",
}


@pytest.mark.parametrize("kind", FRAMES)
def test_framing_costs_no_more_than_a_part_of_its_content(wire: Wire, kind: str) -> None:
    """Eight connections with such bodies slowed everybody's turns down to 44 s."""
    (reply,) = endless(wire, request(CHUNKED), FRAMES[kind])
    check_envelope(reply, 400)
    assert reply.error["message"] == FRAMING_TOLD and reply.closed


@pytest.mark.parametrize("kind", FRAMES)
def test_an_answer_without_a_key_ends_the_reading(wire: Wire, kind: str) -> None:
    head = request(CHUNKED).replace(API_KEY.encode(), b"")
    began = time.monotonic()
    (reply,) = endless(wire, head, FRAMES[kind])
    assert reply.status == 401 and reply.error["type"] == "authentication_error"
    assert reply.headers["connection"] == "close" and reply.closed
    assert time.monotonic() - began < WAIT_SECONDS / 4, "its deadline was not waited for"


@pytest.mark.parametrize("size", [12, 16, 100, 5000])
def test_a_body_in_small_chunks_is_served(wire: Wire, size: int) -> None:
    content = json.dumps(body(system="x" * 30_000)).encode()
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    (reply,) = wire.replies(request(CHUNKED, "connection: close"), chunks + b"0\r\n\r\n")
    assert reply.status == 200, reply


def drip(wire: Wire, start: bytes, content: bytes) -> list[Reply]:
    """Send the rest a byte at a time until the other side has had enough."""
    with wire.connect() as raw:
        raw.sendall(start)
        deadline = time.monotonic() + 180
        for place in range(len(content)):
            assert time.monotonic() < deadline, "it was never cut off"
            time.sleep(0.2)
            try:
                raw.sendall(content[place : place + 1])
            except (BrokenPipeError, ConnectionResetError):
                break
            raw.settimeout(0.001)
            try:
                if raw.recv(1, 2):  # MSG_PEEK: an answer has come
                    break
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
        return read_replies(raw)


@pytest.mark.parametrize(
    ("path", "is_chunked"), [("/v1/messages", False), ("/v1/chat/completions", True)]
)
def test_a_trickling_body_is_408_and_an_end(hasty: Wire, path: str, is_chunked: bool) -> None:
    how = "transfer-encoding: chunked" if is_chunked else "content-length: 50000"
    start = request(how, first=f"POST {path} HTTP/1.1") + (b"5000\r\n" if is_chunked else b"")
    before = len(hasty.engine.requests)
    (reply,) = drip(hasty, start, b"{" + b" " * 500)
    assert reply.status == 408 and reply.closed
    assert reply.error["message"] == "the request's body did not arrive in time"
    assert len(hasty.engine.requests) == before


def test_a_trickling_head_is_408_and_an_end(hasty: Wire) -> None:
    (reply,) = drip(hasty, b"POST /v1/messages HTTP/1.1\r\nx-a: ", b"b" * 500)
    check_envelope(reply, 408)
    assert reply.closed and reply.error["message"] == "the request's headers did not arrive in time"


def test_a_second_head_on_a_connection_has_its_time_too(hasty: Wire) -> None:
    first, second = drip(hasty, request(length(GOOD), content=GOOD) + b"POST /v", b"1" * 500)
    assert first.status == 200
    check_envelope(second, 408)


@pytest.mark.parametrize("start", [b"", b"\r\n"])
def test_a_connection_that_says_nothing_is_closed(hasty: Wire, start: bytes) -> None:
    with hasty.connect() as raw:
        raw.sendall(start)
        replies = read_replies(raw)
    assert [reply.status for reply in replies] == ([408] if start else [])


def test_an_answer_does_not_wait_for_a_body_nor_hold_its_connection_for_ever(hasty: Wire) -> None:
    """Without a key nobody reads the body; the answer is there at once, the rest is dropped."""
    data = request("content-length: 60000").replace(API_KEY.encode(), b"wrong-key")
    with hasty.connect() as raw:
        raw.sendall(data + b"{")
        (reply,) = read_replies(raw)
    assert reply.status == 401 and reply.closed


def test_a_client_that_leaves_in_its_body_is_no_error_of_ours(wire: Wire) -> None:
    def count(status: int) -> float:
        series = f'holdfast_gateway_requests_total{{route="/v1/messages",status="{status}"}}'
        return metric(wire.url, series)

    before = count(499)
    failed = count(500)
    with wire.connect() as raw:
        raw.sendall(request("content-length: 60000") + b"{")
    eventually(lambda: count(499) == before + 1)
    assert count(500) == failed


@pytest.mark.parametrize(
    ("case", "reason"), [("cl_te", "malformed"), ("10k_headers", "head_too_large")]
)
def test_what_was_refused_here_is_counted(wire: Wire, case: str, reason: str) -> None:
    series = f'holdfast_gateway_refused_connections_total{{reason="{reason}"}}'
    before = metric(wire.url, series)
    wire.replies(CASES[case][0])
    assert metric(wire.url, series) == before + 1


URL_SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "image": (
        "/v1/messages",
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:{port}/x.png"}},
    ),
    "document": (
        "/v1/messages",
        {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1:{port}/x.pdf"}},
    ),
    "file": ("/v1/messages", {"type": "document", "source": {"type": "file", "file_id": "f"}}),
    "image_url": (
        "/v1/chat/completions",
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:{port}/x.png"}},
    ),
    "file_url": ("/v1/chat/completions", {"type": "file", "file": {"file_id": "http://x"}}),
}


@pytest.mark.parametrize("name", URL_SOURCES)
def test_nothing_is_ever_fetched_for_a_client(wire: Wire, name: str) -> None:
    """No request makes the gateway open a connection (SSRF): what a place has is not shown."""
    path, part = URL_SOURCES[name]
    with socket.create_server(("127.0.0.1", 0)) as place:
        place.settimeout(0.5)
        named = json.dumps(part).replace("{port}", str(place.getsockname()[1]))
        message = {"role": "user", "content": [json.loads(named)]}
        content = {"model": "scripted", "max_tokens": 4, "messages": [message]}
        headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
        reply = httpx.post(f"{wire.url}{path}", json=content, headers=headers, timeout=120)
        assert reply.status_code == 200
        (entry,) = reply.json()["holdfast"]["ignored"]
        assert entry["path"].startswith("messages")
        with pytest.raises(TimeoutError):
            place.accept()
