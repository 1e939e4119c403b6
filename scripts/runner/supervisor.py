"""The process behind `scripts/run`: sets up, starts every program, waits, and stops them all."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from scripts.runner.children import Child, busy_ports
from scripts.runner.example_prompt import handbook
from scripts.runner.plan import (
    Options,
    Program,
    Secrets,
    UsageError,
    check_engine_args,
    dashboard_url,
    database_label,
    engine_url,
    gateway_environment,
    gateway_url,
    load_secrets,
    needs_of,
    parse_options,
    programs_of,
)
from scripts.setup.install_needs import InstallError, install
from scripts.stack import POLL_SECONDS, ROOT, StartError, python, tail


class Stopped(Exception):
    """Somebody asked the supervisor to stop."""


def on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(signal.Signals(number).name)


def say(text: str) -> None:
    print(text, flush=True)


def check_ports(programs: list[Program]) -> None:
    busy = busy_ports(programs)
    if busy:
        taken = ", ".join(f"{program.port} (for the {program.name})" for program in busy)
        raise StartError(f"these ports are in use: {taken}; stop what listens there and try again")


def prepare_data(data: Path) -> Path:
    """Make the data directory, readable by its owner only, and return the one for logs."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    data.chmod(0o700)  # it may have been there
    logs = data / "logs"
    logs.mkdir(exist_ok=True)
    return logs


@contextmanager
def owning(data: Path) -> Iterator[None]:
    """Hold the data directory. Raise StartError while another `scripts/run` does, before anything
    of its is touched. The kernel ends the hold of a process that died."""
    with (data / "run.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(
                f"`{data}` is used by another scripts/run; name another --data"
            ) from None
        yield


def migrate(options: Options, keys: Secrets, logs: Path) -> None:
    environment = gateway_environment(options, keys, 0)
    say(f"==> migrating {database_label(environment['HOLDFAST_DATABASE_URL'])}")
    log = logs / "migrate.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [*python("gateway"), "migrate"],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode != 0:
        raise StartError(f"the migrations failed{tail(log)}")


def start_all(programs: list[Program], logs: Path, children: list[Child]) -> None:
    """Start the programs side by side and wait until each is ready; `children` gets them."""
    say(f"==> starting {', '.join(program.name for program in programs)}; logs in {logs}")
    for program in programs:
        children.append(Child(program, logs))
    for child in children:
        child.wait(children)


def first_model(key: str) -> str:
    """Ask the gateway for the id to use in the printed request."""
    request = urllib.request.Request(gateway_url(0) + "/v1/models", headers={"x-api-key": key})
    with urllib.request.urlopen(request, timeout=10) as reply:
        model: str = json.load(reply)["data"][0]["id"]
    return model


def write_example(options: Options, model: str) -> Path:
    """Write a request with a marked system prompt; as an argument it would fill the screen."""
    body = {
        "model": model,
        "max_tokens": 64,
        "system": [
            {"type": "text", "text": handbook(), "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": "What is a lease?"}],
    }
    path = options.data / "example-request.json"
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False), "utf-8")
    return path


def print_summary(options: Options, keys: Secrets) -> None:
    example = write_example(options, first_model(keys.api_key))
    gateways = "  ".join(gateway_url(i) for i in range(options.gateways))
    engines = "  ".join(engine_url(i) for i in range(options.engines))
    say("\nHoldfast is running; Ctrl-C stops it.\n")
    say(f"  gateway    {gateways}")
    say(f"  engine     {engines}  ({options.engine})")
    if options.dashboard:
        say(f"  dashboard  {dashboard_url()}  (sign in with either key)")
    say(f"  API key    {keys.api_key}")
    say(f"  admin key  {keys.admin_key}")
    say("\nTry it (a marked system prompt; run it twice: the second reads what the first wrote):\n")
    say(
        f"curl {gateway_url(0)}/v1/messages \\\n"
        f"  -H 'x-api-key: {keys.api_key}' \\\n"
        "  -H 'anthropic-version: 2023-06-01' \\\n"
        "  -H 'content-type: application/json' \\\n"
        f"  -d {shlex.quote(f'@{example}')}\n"
    )


def watch(children: list[Child]) -> NoReturn:
    """Return never: until a signal comes, or a program that should run does not."""
    while True:
        for child in children:
            child.check()
        time.sleep(POLL_SECONDS)


def stop_all(children: list[Child]) -> None:
    """Stop in reverse: nobody loses what it still needs to finish its own work."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if children:
        say("==> stopping")
    for child in reversed(children):
        child.stop()


def serve(options: Options) -> None:
    logs = prepare_data(options.data)
    with owning(options.data):
        serve_from(options, logs)


def serve_from(options: Options, logs: Path) -> None:
    install(needs_of(options, os.environ))
    check_engine_args(options, ROOT)
    keys = load_secrets(options.data, os.environ)
    programs = programs_of(options, keys, ROOT)
    check_ports(programs)
    migrate(options, keys, logs)
    children: list[Child] = []
    try:
        start_all(programs, logs, children)
        print_summary(options, keys)
        watch(children)
    finally:
        stop_all(children)


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        serve(parse_options(arguments))
    except Stopped:
        say("stopped")
        return 0
    except UsageError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    except (StartError, InstallError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
