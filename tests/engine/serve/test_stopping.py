"""How an engine process ends, over real sockets.

Its time to end is longer than any test may take: whoever is gone did not wait for it.
"""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from engine.protocol import Done, EventFrame, Snapshot
from scripts.stack import API_KEY, free_port, python, running_stack, start
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


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT], ids=lambda told: told.name)
def test_an_engine_that_is_told_to_stop_ends_its_event_streams_and_itself(
    told: signal.Signals,
) -> None:
    with running_engine("synthetic", PATIENT) as engine:
        with followed(engine) as one, followed(engine) as other:
            engine.process.send_signal(told)
            list(one)
            list(other)
        assert engine.process.wait(EXIT_SECONDS) == 0


def test_event_streams_end_before_what_runs() -> None:
    with running_engine("synthetic", PATIENT) as engine:
        request = engine.request(prompt("q"), engine.scope(), max_tokens=100_000, ignore_eos=True)
        with engine.stream(request) as generation:
            generation.start()
            with followed(engine) as frames:
                engine.process.send_signal(signal.SIGTERM)
                list(frames)
            assert engine.process.poll() is None, "half an hour of its answer is to come"
        assert engine.process.wait(EXIT_SECONDS) == 0


def test_what_runs_is_finished() -> None:
    with running_engine("synthetic", PATIENT) as engine:
        request = engine.request(prompt("q"), engine.scope(), max_tokens=100, ignore_eos=True)
        with engine.stream(request) as generation:
            generation.start()
            engine.process.send_signal(signal.SIGTERM)
            answer = generation.rest()
        assert [one.output_tokens for one in answer.finished] == [100]
        assert isinstance(answer.last, Done)
        assert engine.process.wait(EXIT_SECONDS) == 0


def test_what_runs_longer_than_the_grace_is_cut_off() -> None:
    with running_engine("synthetic", {**PATIENT, "GRACE_SECONDS": 1}) as engine:
        request = engine.request(prompt("q"), engine.scope(), max_tokens=100_000, ignore_eos=True)
        with engine.stream(request) as generation:
            generation.start()
            engine.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                generation.rest()
        assert engine.process.wait(EXIT_SECONDS) == 0


def test_an_engine_that_is_told_to_stop_does_not_wait_for_its_load(tmp_path: Path) -> None:
    """A hub that takes the connection and never answers holds the load up for hours."""
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(EXIT_SECONDS)
        environment = {
            "ENGINE_SECRET": "a-secret-of-some-length",
            "ENGINE_PORT": str(free_port()),
            "ENGINE_MODEL": "nobody/nothing",
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_ETAG_TIMEOUT": "10000",
            "HF_HUB_DOWNLOAD_TIMEOUT": "10000",
            "HF_HOME": str(tmp_path),
        }
        process = start(python("engine"), environment, tmp_path / "log")
        try:
            asked, _ = hub.accept()
            with asked:
                process.terminate()
                assert process.wait(EXIT_SECONDS) == 0
        finally:
            process.kill()


def test_a_load_that_fails_ends_the_process_with_an_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environment = {
        "ENGINE_SECRET": "a-secret-of-some-length",
        "ENGINE_PORT": str(free_port()),
        "ENGINE_MODEL": str(tmp_path),
    }
    process = start(python("engine"), environment, tmp_path / "log")
    try:
        assert process.wait(EXIT_SECONDS) == 1
        assert '"event": "engine failed"' in (tmp_path / "log").read_text("utf-8")
    finally:
        process.kill()


def test_a_gateway_gets_the_turn_that_runs_to_its_end_and_marks_the_engine_down(
    tmp_path: Path,
) -> None:
    settings = {f"ENGINE_{name}": str(value) for name, value in PATIENT.items()}
    body = {"model": "synthetic", "max_tokens": 100, "stream": True}
    body["messages"] = [{"role": "user", "content": "q"}]
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    with running_stack(tmp_path, "synthetic", settings) as stack:
        url = f"{stack.gateway}/v1/messages"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: message_start"
            stack.engine_process.terminate()
            events = [line for line in lines if line.startswith("event: ")]
        assert events[-1] == "event: message_stop"
        assert "event: error" not in events
        assert stack.engine_process.wait(EXIT_SECONDS) == 0
        deadline = time.monotonic() + EXIT_SECONDS
        while httpx.get(f"{stack.gateway}/readyz", timeout=120).status_code != 503:
            assert time.monotonic() < deadline, "the gateway does not notice"
            time.sleep(0.1)
