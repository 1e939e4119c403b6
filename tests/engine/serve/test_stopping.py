"""How an engine process ends, over real sockets.

Its time to end is longer than any test may take: whoever is gone did not wait for it.
"""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from subprocess import Popen

import httpx
import msgspec
import psutil
import pytest

from engine.protocol import CountRequest, Done, ErrorReply, EventFrame, GenerateRequest, Snapshot
from scripts.stack import free_port, python, start
from tests.conformance.engines import Engine, prompt, running_engine

EXIT_SECONDS = 180.0
PATIENT = {"GRACE_SECONDS": 10_000, "SYNTHETIC_PREFILL_US": 0, "SYNTHETIC_DECODE_MS": 20}


@contextmanager
def followed(engine: Engine) -> Iterator[Iterator[EventFrame]]:
    """Frames after the first; an end that is not the chunked body's own raises RemoteProtocolError.

    The first one is there, so the engine knows its subscriber.
    """
    decoder = msgspec.json.Decoder(EventFrame)
    with engine.client.stream("GET", "/v1/events") as response:
        assert response.headers["transfer-encoding"] == "chunked"
        frames = (decoder.decode(line) for line in response.iter_lines() if line)
        assert isinstance(next(frames), Snapshot)
        yield frames


def request_of(engine: Engine, max_tokens: int) -> GenerateRequest:
    return engine.request(prompt("q"), engine.scope(), max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize(
    ("signal_number", "max_tokens"),
    [(signal.SIGTERM, 100_000), (signal.SIGINT, 100)],
    ids=["TERM", "INT"],
)
def test_an_engine_that_is_told_to_stop_ends_its_event_streams_and_then_what_runs(
    signal_number: signal.Signals, max_tokens: int
) -> None:
    with running_engine("synthetic", PATIENT) as engine:
        with engine.stream(request_of(engine, max_tokens)) as generation:
            generation.start()
            with followed(engine) as first, followed(engine) as second:
                engine.process.send_signal(signal_number)
                list(first)
                list(second)
            if max_tokens == 100_000:
                assert engine.process.poll() is None, "half an hour of its answer is to come"
            else:
                answer = generation.rest()
                assert [choice.output_tokens for choice in answer.finished] == [max_tokens]
                assert isinstance(answer.last, Done)
        assert engine.process.wait(EXIT_SECONDS) == 0


def test_what_runs_longer_than_the_grace_is_cut_off() -> None:
    with running_engine("synthetic", {**PATIENT, "GRACE_SECONDS": 1}) as engine:
        with engine.stream(request_of(engine, 100_000)) as generation:
            generation.start()
            engine.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                generation.rest()
        assert engine.process.wait(EXIT_SECONDS) == 0


@pytest.mark.parametrize("path", ["generate", "count"])
def test_what_has_no_answer_yet_when_the_grace_ends_is_told_so(path: str) -> None:
    """It was a plain 500. Here its worker is stopped, so that its prompt is never prepared."""
    with running_engine("synthetic", {**PATIENT, "GRACE_SECONDS": 1}) as engine:
        workers = psutil.Process(engine.process.pid).children(recursive=True)
        asked_of = {
            "generate": request_of(engine, 1),
            "count": CountRequest(engine.scope(), prompt("q")),
        }
        for worker in workers:
            worker.suspend()
        try:
            connection = HTTPConnection("127.0.0.1", int(engine.url.rpartition(":")[2]))
            body = msgspec.json.encode(asked_of[path])
            connection.request("POST", f"/v1/{path}", body, dict(engine.client.headers))
            # What was sent before these has been read when they are answered.
            for _ in range(3):
                httpx.get(f"{engine.url}/healthz")
            engine.process.send_signal(signal.SIGTERM)
            reply = connection.getresponse()
            assert reply.status == 503
            assert reply.headers["retry-after"] == "1"
            assert msgspec.json.decode(reply.read(), type=ErrorReply).code == "not_ready"
            assert engine.process.wait(EXIT_SECONDS) == 0
        finally:
            for worker in workers:
                if worker.is_running():
                    worker.kill()


@contextmanager
def loading(folder: Path, model: str, **more: str) -> Iterator[Popen[bytes]]:
    """An engine that loads a model; what it prints goes to `log` in the folder."""
    environment = {
        "ENGINE_SECRET": "a-secret-of-some-length",
        "ENGINE_PORT": str(free_port()),
        "ENGINE_MODEL": model,
        "HF_HOME": str(folder),
        **more,
    }
    process = start(python("engine"), environment, folder / "log")
    try:
        yield process
    finally:
        process.kill()


def test_an_engine_that_is_told_to_stop_does_not_wait_for_its_load(tmp_path: Path) -> None:
    """A hub that takes the connection and never answers holds the load up for hours."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(EXIT_SECONDS)
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        patient = {"HF_HUB_ETAG_TIMEOUT": "10000", "HF_HUB_DOWNLOAD_TIMEOUT": "10000"}
        online = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", **patient}
        with loading(tmp_path, "nobody/nothing", **online) as process:
            connection, _ = hub.accept()
            with connection:
                process.terminate()
                assert process.wait(EXIT_SECONDS) == 0


def test_a_load_that_fails_ends_the_process_with_an_error(tmp_path: Path) -> None:
    with loading(tmp_path, str(tmp_path)) as process:
        assert process.wait(EXIT_SECONDS) == 1
        assert '"event": "engine failed"' in (tmp_path / "log").read_text("utf-8")
