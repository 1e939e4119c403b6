"""`python -m gateway leases list` prints what the admin API says of live entries."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.cli.main import main
from scripts.stack import ADMIN_KEY, API_HEADERS, ENGINE_SECRET, MASTER_SECRET, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve

LONG = "A lease holds the memory of a prefix until its time is over. " * 400
Said = tuple[int, list[str], list[str]]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway whose engine holds one leased prefix."""
    with running_stack(tmp_path_factory.mktemp("leases"), "synthetic") as stack:
        mark = {"type": "ephemeral", "ttl": "1h"}
        request = {
            "model": "synthetic",
            "max_tokens": 1,
            "system": [{"type": "text", "text": LONG, "cache_control": mark}],
            "messages": [{"role": "user", "content": "What is a lease?"}],
        }
        reply = httpx.post(
            f"{stack.gateway}/v1/messages", json=request, headers=API_HEADERS, timeout=120
        )
        assert reply.status_code == 200, reply.text
        eventually(lambda: Admin(stack.gateway).get("leases"))
        yield stack.gateway


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Said]:
    """The status of `leases list WORDS`, and the lines on each output."""
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_ENGINE_SECRET", ENGINE_SECRET)
    monkeypatch.setenv("HOLDFAST_MASTER_SECRET", MASTER_SECRET)
    monkeypatch.setenv("HOLDFAST_ADMIN_KEY", ADMIN_KEY)

    def run(*words: str) -> Said:
        status = main(["leases", "list", *words])
        output = capsys.readouterr()
        return status, output.out.splitlines(), output.err.splitlines()

    return run


def test_each_entry_is_a_line(url: str, say: Callable[..., Said]) -> None:
    (live,) = [e for e in Admin(url).get("leases") if e["entry"]["state"] == "leased"]
    entry = live["entry"]
    engine = live["engine"]
    status, lines, errors = say("--url", url, "--workspace", "default", "--engine", engine)
    (line,) = [line for line in lines if line.endswith("leased")]
    assert (status, errors) == (0, [])
    assert line.startswith(
        f"{entry['name'][:16]} {engine} default {entry['tokens']} tokens, TTL 1h"
    )
    seconds_left = float(line.split(", ")[2].removesuffix(" s left"))
    assert entry["expires_in_seconds"] - 120 < seconds_left <= 3600


@pytest.mark.parametrize("what", ["workspace", "engine"])
def test_an_unknown_name_is_told_with_those_that_are_there(
    url: str, say: Callable[..., Said], what: str
) -> None:
    status, lines, (error,) = say("--url", url, f"--{what}", "nobody")
    assert (status, lines) == (2, [])
    assert error.startswith(f"--{what}: no {what} `nobody`; there are: ")


def test_what_the_gateway_refuses_is_one_line(url: str, say: Callable[..., Said]) -> None:
    status, lines, (error,) = say("--url", url, "--workspace", "x" * 65)
    assert (status, lines) == (2, []) and "workspace" in error


def test_a_wrong_or_missing_key_is_one_line(
    url: str, say: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ADMIN_KEY", "another")
    status, _, (error,) = say("--url", url)
    assert status == 2 and error.startswith(f"the gateway at {url} refuses: ")
    monkeypatch.delenv("HOLDFAST_ADMIN_KEY")
    status, _, (error,) = say("--url", url)
    assert status == 2 and error.startswith("HOLDFAST_ADMIN_KEY: is not set")


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:9", "127.0.0.1:9", "nowhere"])
def test_no_gateway_is_one_line(say: Callable[..., Said], wrong: str) -> None:
    status, _, (error,) = say("--url", wrong)
    assert status == 2 and error.startswith(f"no gateway of this version answers at {wrong}")


def test_an_engine_that_tells_nothing_has_a_line_that_says_so(
    url: str, say: Callable[..., Said]
) -> None:
    with serve(ScriptedEngine()) as address:
        added = Admin(url).post("engines", {"url": address})
    name = added["name"]

    def lines_of(*words: str) -> list[str]:
        status, lines, _ = say("--url", url, *words)
        assert (status == 1) == any(" not known: " in line for line in lines)
        return lines

    eventually(lambda: any(line.startswith(f"{name} not known: ") for line in lines_of()))
    assert any(line.endswith("leased") for line in lines_of()), "the others are told"
    assert len(lines_of("--engine", name)) == 1
    Admin(url).delete(f"engines/{name}")
    assert not any("not known" in line for line in lines_of())
