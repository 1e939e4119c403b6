"""scripts/run as it runs: side by side, after a crash, to its end, and with the sample month."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import pytest

from gateway.base.settings import DatabaseSettings
from scripts.bench.load import body_of, headers_of
from scripts.runner.data import Secrets, read_secrets
from scripts.runner.options import (
    SAMPLE_DATABASE,
    alias_of,
    gateway_environment,
    parse_options,
)
from scripts.runner.supervisor import MADE, own_id
from scripts.sample.__main__ import fill_sample
from scripts.sample.cast import APPS, MACHINES
from scripts.stack import ENGINE_SECRET, ROOT, serving_engine
from tests.faults.sizes import number
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually
from tests.migrated import migrate
from tests.scripts.runs import Run, ended, environment, only_line, started, wait_gone

LIGHT = ("--engine", "synthetic", "--no-dashboard")
RUNNING = "Holdfast is running"


def key_of(run: Run) -> str:
    stored = read_secrets(run.data)
    assert stored is not None
    return stored.api_key


def usage_of_example(run: Run) -> dict[str, int]:
    """What the printed request's answer says."""
    body = json.loads((run.data / "example-request.json").read_text("utf-8"))
    headers = headers_of(key_of(run))
    reply = httpx.post(f"{run.url}/v1/messages", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    usage: dict[str, int] = reply.json()["usage"]
    return usage


@pytest.mark.slow  # two whole installations
def test_two_run_side_by_side_and_each_keeps_its_data_to_itself(tmp_path: Path) -> None:
    with started(tmp_path / "one", *LIGHT) as first, started(tmp_path / "two", *LIGHT) as second:
        for run in (first, second):
            run.wait_said(RUNNING)
            written_tokens = usage_of_example(run)["cache_creation_input_tokens"]
            assert usage_of_example(run)["cache_read_input_tokens"] == written_tokens > 1024
        message = only_line(ended("--port", str(second.base), "--data", first.data, *LIGHT))
        assert f"used by another scripts/run (process {first.process.pid}, {first.url})" in message
        assert key_of(first) != key_of(second)
        assert first.end() == 0 and first.said.endswith("==> stopping\nstopped\n")
        assert usage_of_example(second)["cache_read_input_tokens"] == written_tokens
        second.process.kill()
        second.process.wait()
        wait_gone(second.mark)


def test_engines_that_run_elsewhere_are_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CLAUDE_ALIAS", "true")
    with serving_engine("synthetic") as engine:
        engine.wait()
        attach = ("--attach", f"{engine.url}/", "--secret", ENGINE_SECRET, "--no-dashboard")
        with started(tmp_path, *attach) as run:
            run.wait_said(RUNNING)
            assert f"{engine.url}  (attached)" in run.said
            written_tokens = usage_of_example(run)["cache_creation_input_tokens"]
            assert usage_of_example(run)["cache_read_input_tokens"] == written_tokens > 1024
            body = {"model": "claude-sonnet-5", "max_tokens": 1}
            body["messages"] = [{"role": "user", "content": "hello"}]
            headers = headers_of(key_of(run))
            reply = httpx.post(f"{run.url}/v1/messages", json=body, headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text
            assert run.end() == 0
        assert engine.process.poll() is None, "what was attached runs on"


def test_openais_quickstart_runs_as_it_is(tmp_path: Path) -> None:
    """https://platform.openai.com/docs/guides/conversation-state: a call names the one before."""
    with started(tmp_path, *LIGHT) as run:
        run.wait_said(RUNNING)
        run.wait_said(r"responses  kept for 1 day, encrypted, .*\(HOLDFAST_RESPONSE_DAYS\)")
        client = openai.OpenAI(base_url=f"{run.url}/v1", api_key=key_of(run))
        first = client.responses.create(
            model="synthetic", input="tell me a joke", max_output_tokens=16
        )
        second = client.responses.create(
            model="synthetic",
            previous_response_id=first.id,
            input=[{"role": "user", "content": "explain why this is funny."}],
            max_output_tokens=16,  # the synthetic model has no end of its own
        )
        assert second.usage is not None and first.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens
        assert second.previous_response_id == first.id


@pytest.mark.parametrize(("wanted", "days"), [(None, "1"), ("", "1"), ("7", "7"), ("0", "0")])
def test_responses_are_kept_for_a_day_where_nothing_else_is_said(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, days: str
) -> None:
    monkeypatch.delenv("HOLDFAST_RESPONSE_DAYS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("HOLDFAST_RESPONSE_DAYS", wanted)
    secrets = Secrets(**{field.name: "x" * 32 for field in fields(Secrets)})
    environment = gateway_environment(parse_options([]), secrets, 0)
    assert environment["HOLDFAST_RESPONSE_DAYS"] == days


def test_a_dead_engine_is_started_again(tmp_path: Path) -> None:
    with started(tmp_path, *LIGHT) as run:
        run.wait_said(RUNNING)
        usage_of_example(run)
        subprocess.run(["kill", "-9", str(run.pid_of("engine"))], check=True)
        run.wait_said(r"the engine was killed \(SIGKILL.*\); started again in 1 s; what it had")
        run.wait_said("the engine is ready again")
        deadline = time.monotonic() + 300
        while httpx.get(f"{run.url}/readyz", timeout=60).status_code != 200:
            assert time.monotonic() < deadline
        assert usage_of_example(run)["cache_creation_input_tokens"] > 1024


@pytest.mark.slow  # each start waits twice as long as the one before
def test_an_engine_that_always_dies_ends_the_command(tmp_path: Path) -> None:
    with started(tmp_path, *LIGHT) as run:
        run.wait_said(RUNNING)
        # From now on its port is taken, so that each start fails.
        subprocess.run(["kill", "-9", str(run.pid_of("engine"))], check=True)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bind(listener, run.engine_port)
            listener.listen()
            assert run.process.wait(300) == 1
        wait_gone(run.mark)
    last = run.said.splitlines()[-1]
    assert last.startswith("run: the engine ended 5 times in a row; at last it ended with status")
    assert "address already in use" in last and "engine.log" in last
    assert "Traceback" not in run.said


def bind(listener: socket.socket, port: int) -> None:
    """As soon as the kernel took it from the process that was killed."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return listener.bind(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_running_request_ends_in_full_unless_a_second_signal_cuts_it_off(
    tmp_path: Path, is_cut_off: bool
) -> None:
    decode_ms = 1000 if is_cut_off else 100
    lines = list[str]()
    with started(tmp_path, *LIGHT, "--engine-arg", f"synthetic_decode_ms={decode_ms}") as run:
        run.wait_said(RUNNING)
        asking = threading.Thread(target=stream, args=(run, 40, lines))
        asking.start()
        while not any("content_block_delta" in line for line in lines):
            time.sleep(0.05)
        if is_cut_off:
            run.process.send_signal(signal.SIGINT)
            run.wait_said("==> stopping")
        signal_number = signal.SIGINT if is_cut_off else signal.SIGTERM
        assert run.end(signal_number) == (130 if is_cut_off else 0)
        asking.join()
    assert any("message_stop" in line for line in lines) != is_cut_off, lines[-3:]
    assert ("cut off" if is_cut_off else "Ctrl-C again cuts them off") in run.said
    assert "Traceback" not in run.said


def stream(run: Run, max_tokens: int, lines: list[str]) -> None:
    body = body_of("synthetic", [], "Count.", max_tokens=max_tokens, stream=True)
    headers = headers_of(key_of(run))
    url = f"{run.url}/v1/messages"
    try:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as reply:
            for line in reply.iter_lines():
                lines.append(line)
    except httpx.TransportError as error:
        lines.append(repr(error))


@pytest.mark.parametrize(
    ("signal_number", "times"),
    [
        # Each time with one of the two; scripts/long_tests faults takes more.
        (signal.SIGINT, number((0.3, 2.5), (0.1, 0.3, 0.6, 1.0, 1.6, 2.5, 4.0))),
        (signal.SIGTERM, number((1.0,), (0.1, 0.3, 0.6, 1.0, 1.6, 2.5, 4.0))),
    ],
)
def test_a_signal_at_any_time_leaves_no_traceback_and_no_process(
    tmp_path: Path, signal_number: signal.Signals, times: tuple[float, ...]
) -> None:
    for seconds in times:
        with started(tmp_path / str(seconds), *LIGHT) as run:
            time.sleep(seconds)
            # Until the first statements of the program, the signal itself ends it.
            assert run.end(signal_number) in (0, -signal_number)
            assert "Traceback" not in run.said, (seconds, run.said)


def test_programs_get_longer_to_end_than_they_give_their_requests(tmp_path: Path) -> None:
    code = (
        "from scripts.runner.options import parse_options as parse\n"
        "from scripts.runner.options import engine_program, gateway_program\n"
        "from scripts.runner.data import Secrets\n"
        "keys = Secrets(api_key='a', admin_key='b', engine_secret='c', master_secret='d')\n"
        "args = ['--engine-arg', 'grace_seconds=70']\n"
        "print(engine_program(parse(args), keys, 0).grace_seconds,\n"
        "      engine_program(parse([]), keys, 0).grace_seconds,\n"
        "      gateway_program(parse([]), keys, 0).grace_seconds)\n"
    )
    changes = {"ENGINE_GRACE_SECONDS": "20", "HOLDFAST_DRAIN_SECONDS": "3"}
    command = [sys.executable, "-c", code]
    env = environment(changes)
    output = subprocess.check_output(command, cwd=ROOT, env=env, text=True)
    assert output.split() == ["70.0", "20.0", "33.0"]


def check_live_engines(admin: Admin) -> None:
    """The month's engines hold prefixes of its applications, and no turn is on them."""
    newest = "turns/search?since_ms=0&limit=1"
    turns = admin.get(newest)
    names = {machine.name for machine in MACHINES}
    apps = {app.workspace for app in APPS}

    def holders() -> set[str]:
        leases = admin.get("leases")
        assert {lease["workspace"] for lease in leases} <= apps, "each is some application's"
        return {lease["engine"] for lease in leases}

    eventually(lambda: holders() == names)
    # What the ledger knows of a prefix is told of its lease.
    eventually(lambda: any(lease["prefix"] for lease in admin.get("leases")))
    assert {engine["description"]["backend"] for engine in admin.get("engines")} == {"synthetic"}
    assert all(engine["held"] for engine in admin.get("engines/memory"))
    assert admin.get(newest) == turns
    assert admin.get("about")["sample"]


def make_sample(data: Path) -> None:
    """A month of fewer turns than the command makes up, and as if it had."""
    url = f"sqlite+aiosqlite:///{data / SAMPLE_DATABASE}"
    database = DatabaseSettings(data=data, database_url=url)
    migrate(database)
    fill_sample(database, datetime.now(UTC), 2500, 1)
    (data / MADE).touch()


def test_the_sample_month_is_shown_and_the_demo_says_that_it_serves_no_turn(tmp_path: Path) -> None:
    make_sample(tmp_path / "data")
    with started(tmp_path, "--sample") as run:
        run.wait_said("A made-up month is shown")
        dashboard = f"http://127.0.0.1:{run.base + 421}"
        assert dashboard in run.said and "admin key" in run.said
        page = httpx.get(f"{dashboard}/login", timeout=120)
        assert page.status_code == 200 and "key" in page.text, "the page to sign in"
        stored = read_secrets(run.data)
        assert stored is not None
        admin = {"x-api-key": stored.admin_key}
        spaces = httpx.get(f"{run.url}/admin/v1/workspaces", headers=admin, timeout=60)
        assert spaces.status_code == 200 and len(spaces.json()) > 2, spaces.text
        check_live_engines(Admin(run.url, stored.admin_key))
        message = only_line(ended("demo", "--data", run.data), "demo")
        assert "shows sample data; start scripts/run without --sample" in message
        assert run.end() == 0


@pytest.mark.slow
def test_a_sample_month_is_made_up_once(tmp_path: Path) -> None:
    for is_there in (False, True):
        with started(tmp_path, "--sample") as run:
            run.wait_said("A made-up month is shown")
            assert ("making up" in run.said or "made up" in run.said) != is_there
            assert run.end() == 0


def test_another_model_runs_under_its_own_id_alone_and_the_request_names_it(tmp_path: Path) -> None:
    """The printed request is the one of this data directory, and asks for what runs."""
    model = tmp_path / "my-model"
    shutil.copytree(ROOT / "engine" / "holdfast-demo", model)
    with started(tmp_path / "data", "--model", model, "--no-dashboard") as run:
        run.wait_said(RUNNING)
        example = run.data / "example-request.json"
        assert f"-d @{example}" in run.said
        assert json.loads(example.read_text("utf-8"))["model"] == "my-model"
        listed = httpx.get(f"{run.url}/v1/models", headers=headers_of(key_of(run)), timeout=60)
        assert [entry["id"] for entry in listed.json()["data"]] == ["my-model"]
        assert usage_of_example(run)["cache_creation_input_tokens"] > 1024


def test_an_alias_that_comes_first_is_not_what_the_printed_request_names() -> None:
    alias = {"id": "house", "root": "tiny"}
    adapter = {"id": "tiny:a", "root": "a"}
    assert own_id([alias, adapter, {"id": "tiny"}]) == "tiny"
    assert own_id([alias]) == "house"


def test_claude_ids_mean_what_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name: another model may have run with this data before."""
    monkeypatch.delenv("ENGINE_MODEL", raising=False)
    monkeypatch.delenv("HOLDFAST_MODELS", raising=False)
    options = parse_options(["--model", str(ROOT / "engine" / "holdfast-demo")])
    assert alias_of(options) == {}
    monkeypatch.setenv("HOLDFAST_CLAUDE_ALIAS", "true")
    assert alias_of(options) == {"HOLDFAST_CLAUDE_ALIAS": "holdfast-demo"}
    assert alias_of(parse_options(["--model", "org/tiny"])) == {"HOLDFAST_CLAUDE_ALIAS": "tiny"}
    assert alias_of(parse_options(["--engine", "synthetic"])) == {
        "HOLDFAST_CLAUDE_ALIAS": "synthetic"
    }
    monkeypatch.setenv("HOLDFAST_CLAUDE_ALIAS", "mine")
    assert alias_of(options) == {}
