"""The process behind `scripts/run`: sets up, starts every program, keeps it, and stops them all."""

import json
import os
import shlex
import sys
import urllib.error
import urllib.request
from pathlib import Path

from scripts.runner import sample
from scripts.runner.children import Child, die_with_parent, last_words
from scripts.runner.data import Running, Secrets, load_secrets, owning, prepare_data
from scripts.runner.example_prompt import handbook
from scripts.runner.keeper import Keeper
from scripts.runner.model import check_model
from scripts.runner.options import GATEWAY_PORT, Options, UsageError, default_data, parse_options
from scripts.runner.plan import (
    Program,
    check_engine_args,
    database_label,
    engine_python,
    gateway_environment,
    misspelt_settings,
    needs_of,
    programs_of,
)
from scripts.runner.ports import check_ports
from scripts.runner.signals import Signals, Stopped
from scripts.setup.install_needs import InstallError, install
from scripts.stack import ROOT, StartError, insist, python, start

FORBIDDEN = 403
URGENT_STATUS = 130


def say(text: str) -> None:
    print(text, flush=True)


def migrate(environment: dict[str, str], logs: Path) -> None:
    """Raises StartError with the database's reason."""
    label = database_label(environment["HOLDFAST_DATABASE_URL"])
    say(f"==> migrating {label}")
    log = logs / "migrate.log"
    process = start([*python("gateway"), "migrate"], environment, log, before_exec=die_with_parent)
    try:
        status = process.wait()
    finally:
        insist(process, 2)
    if status != 0:
        raise StartError(f"the database {label} can't be used: {last_words(log)} (its log: {log})")


def start_all(programs: list[Program], logs: Path, keeper: Keeper) -> None:
    """Start the programs side by side and wait until each is ready."""
    say(f"==> starting {', '.join(program.name for program in programs)}; logs in {logs}")
    for program in programs:
        keeper.add(Child(program, logs), logs)
    for child in keeper.children:
        child.wait(keeper.children, say)


def first_model(options: Options, key: str) -> str:
    """Ask the gateway for the id to use in the printed request."""
    url = options.gateway_url() + "/v1/models"
    request = urllib.request.Request(url, headers={"x-api-key": key})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as reply:
            model: str = json.load(reply)["data"][0]["id"]
    except urllib.error.HTTPError as refusal:
        if refusal.code == FORBIDDEN:
            raise StartError(
                f"`--data {options.data}` has a database of sample data, which serves no turns; "
                "name another --data, or see the sample with `scripts/run --sample`"
            ) from refusal
        raise StartError(f"{url} answered {refusal.code}: {refusal.read(300)!r}") from refusal
    except OSError as error:
        raise StartError(f"{url} does not answer: {error}") from error
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
    example = write_example(options, first_model(options, keys.api_key))
    gateways = "  ".join(options.gateway_url(i) for i in range(options.gateways))
    engines = "  ".join(options.engine_url(i) for i in range(options.engines))
    say("\nHoldfast is running; Ctrl-C stops it.\n")
    say(f"  gateway    {gateways}")
    say(f"  engine     {engines}  ({options.engine})")
    if options.dashboard:
        say(f"  dashboard  {options.dashboard_url}  (sign in with either key)")
    say(f"  API key    {keys.api_key}")
    say(f"  admin key  {keys.admin_key}")
    say("\nTry it (a marked system prompt; run it twice: the second reads what the first wrote):\n")
    say(
        f"curl {options.gateway_url()}/v1/messages \\\n"
        f"  -H 'x-api-key: {keys.api_key}' \\\n"
        "  -H 'anthropic-version: 2023-06-01' \\\n"
        "  -H 'content-type: application/json' \\\n"
        f"  -d {shlex.quote(f'@{example}')}\n"
    )
    say(f"Or see in a minute what a lease is worth, in another terminal: {demo_command(options)}\n")


def demo_command(options: Options) -> str:
    words = ["scripts/demo"]
    if options.ports.base != GATEWAY_PORT:
        words += ["--port", str(options.ports.base)]
    if options.data != default_data(options.ports.base):
        words += ["--data", str(options.data)]
    return shlex.join(words)


def print_sample_summary(options: Options, keys: Secrets) -> None:
    say("\nA made-up month is shown; Ctrl-C stops it. Nothing of it was measured.\n")
    say(f"  dashboard  {options.dashboard_url}")
    say(f"  admin key  {keys.admin_key}  (sign in with it)")
    say("\nTurns are served by `scripts/run` without --sample.\n")


def serve(options: Options, signals: Signals) -> None:
    """Raises StartError and UsageError, each with one line that says what to do."""
    if not options.sample:
        engine_python(options.engine, os.environ)
        if options.model is not None and options.engine != "synthetic":
            check_model(options.model, options.engine, os.environ)
    logs = prepare_data(options.data)
    dashboard = options.dashboard_url if options.dashboard else None
    running = Running(pid=os.getpid(), gateway=options.gateway_url(), dashboard=dashboard)
    with owning(options.data, running):
        serve_from(options, logs, signals)


def serve_from(options: Options, logs: Path, signals: Signals) -> None:
    for line in misspelt_settings(os.environ):
        say(f"==> warning: {line}")
    keys = load_secrets(options.data, os.environ)
    programs = programs_of(options, keys)
    check_ports(programs, options)
    install(needs_of(options, os.environ))
    check_engine_args(options, ROOT)
    environment = gateway_environment(options, keys, 0)
    if options.sample and not sample.is_made(options.data):
        sample.drop_month(options.data)
    migrate(environment, logs)
    if options.sample and not sample.is_made(options.data):
        sample.make_month(options.data, environment, logs)
    keeper = Keeper(say)
    try:
        start_all(programs, logs, keeper)
        (print_sample_summary if options.sample else print_summary)(options, keys)
        keeper.watch()
    finally:
        signals.no_longer_raise()
        if keeper.children:
            say("==> stopping")
        keeper.stop(lambda: signals.is_urgent)


def main(arguments: list[str]) -> int:
    signals = Signals()
    signals.listen()
    try:
        serve(parse_options(arguments), signals)
    except Stopped:
        say("cut off" if signals.is_urgent else "stopped")
        return URGENT_STATUS if signals.is_urgent else 0
    except UsageError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    except (StartError, InstallError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # such as a disk that became full
        what = f": {error.filename}" if error.filename else ""
        print(f"run: {error.strerror or error}{what}", file=sys.stderr)
        return 1
    return 0
