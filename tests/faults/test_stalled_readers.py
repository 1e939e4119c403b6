"""F5 and F9: what a client sends or does not read takes a bounded part of the gateway's memory."""

import json
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from engine.protocol import Frame, GenerateRequest, InputUsage, TextDelta
from scripts.stack import serving_gateway
from tests.faults.sizes import number, told
from tests.gateway.bodies import body
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import ADMIN_KEY, API_KEY, ask, eventually, metric, serve

MIB = 1 << 20
STALL_SECONDS = 5
BODY_LIMIT = 32 * MIB


@dataclass
class Watched:
    """A gateway process in front of a scripted engine in this one."""

    url: str
    engine: ScriptedEngine
    process: psutil.Process

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    def peak(self) -> int:
        """The largest resident set since `forget_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def ask(self) -> httpx.Response:
        return ask(self.url)


@contextmanager
def watched(tmp_path: Path) -> Iterator[Watched]:
    engine = ScriptedEngine()
    tuning = json.dumps({"stall_seconds": STALL_SECONDS})
    settings = {"HOLDFAST_TUNING": tuning, "HOLDFAST_LOG_LEVEL": "error"}
    with serve(engine) as url, serving_gateway(tmp_path, [url], settings) as gateway:
        watched_gateway = Watched(gateway.wait().url, engine, psutil.Process(gateway.pid))
        for _ in range(20):  # what is loaded and allocated once
            assert watched_gateway.ask().status_code == 200
        yield watched_gateway


def head(*headers: str) -> bytes:
    lines = (
        "POST /v1/messages HTTP/1.1",
        "host: gateway",
        f"x-api-key: {API_KEY}",
        "anthropic-version: 2023-06-01",
        "content-type: application/json",
        *headers,
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def connect(url: str, receive_bytes: int | None = None) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    raw = socket.socket()
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(60)
    raw.connect((host, int(port)))
    return raw


ENDLESS_TOKENS = 64_000
"""A request for so many gets an endless answer, any other a short one."""


def endless(request: GenerateRequest, usage: InputUsage) -> list[Frame | float | bytes]:
    if request.sampling.max_tokens != ENDLESS_TOKENS:
        return list(say("quick")(request, usage))
    # Faster than any model writes, yet slow enough to be told of other things meanwhile.
    return [TextDelta("x" * 10_000), 0.02] * 50_000


def test_readers_that_stop_take_little_memory_and_are_cut_off(tmp_path: Path) -> None:
    readers = number(20, 100)
    content = json.dumps(body(stream=True, max_tokens=ENDLESS_TOKENS)).encode()
    with watched(tmp_path) as gateway, ExitStack() as stack:
        gateway.engine.script = endless
        gateway.forget_peak()
        before = gateway.rss()
        for _ in range(readers):
            raw = stack.enter_context(connect(gateway.url, 4096))
            raw.sendall(head(f"content-length: {len(content)}") + content)
            assert raw.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: len(gateway.engine.requests) >= 20 + readers)
        # Others are served meanwhile, and every stalled turn ends like one whose client left.
        reply = gateway.ask()
        assert reply.status_code == 200, reply.text
        begun = time.monotonic()
        eventually(lambda: not gateway.engine.running, 180)
        grown = gateway.peak() - before
        eventually(lambda: outcomes(gateway.url).count("client_disconnect") == readers)
        series = 'holdfast_gateway_refused_connections_total{reason="stalled_reader"}'
        cut = metric(gateway.url, series)
        told(
            "F5",
            readers=readers,
            peak_memory_added=f"{grown / MIB:.1f} MiB",
            cut_off_after=f"{time.monotonic() - begun:.1f} s",
        )
        assert cut == readers
        assert grown < 64 * MIB
        reply = gateway.ask()
        assert reply.status_code == 200, reply.text


def outcomes(url: str) -> list[str]:
    headers = {"x-api-key": ADMIN_KEY}
    rows = httpx.get(f"{url}/admin/v1/turns?limit=1000", headers=headers, timeout=120).json()
    return [row["outcome"] for row in rows]


def test_refused_bodies_take_no_more_than_three_times_the_limit(tmp_path: Path) -> None:
    too_long = json.dumps(body(system="x" * (BODY_LIMIT + MIB))).encode()
    chunks = b"".join(
        b"%x\r\n" % len(piece) + piece + b"\r\n"
        for piece in (too_long[i : i + 65536] for i in range(0, len(too_long), 65536))
    )
    bomb = zlib.compress(b" " * (1 << 30), 9, wbits=31)
    endless_header = b"x-a: " + b"b" * (BODY_LIMIT * 2)
    cases = {
        "content-length": (head(f"content-length: {len(too_long)}") + too_long, 413),
        "chunked": (head("transfer-encoding: chunked") + chunks + b"0\r\n\r\n", 413),
        "gzip, 1 GiB": (
            head(f"content-length: {len(bomb)}", "content-encoding: gzip") + bomb,
            415,
        ),
        "header": (head()[:-2] + endless_header, 431),
    }
    with watched(tmp_path) as gateway:
        for name, (data, status) in cases.items():
            gateway.forget_peak()
            before = gateway.rss()
            with connect(gateway.url) as raw:
                try:
                    raw.sendall(data)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                try:
                    assert raw.recv(12) == b"HTTP/1.1 %d" % status, name
                except ConnectionResetError:
                    # It was closed while we still sent, and the answer went down with it.
                    assert status == 431
            grown = gateway.peak() - before
            told("F9", sent=name, status=status, peak_memory_added=f"{grown / MIB:.1f} MiB")
            assert grown <= 3 * BODY_LIMIT, name
        assert gateway.ask().status_code == 200
