"""The process behind `scripts/run`: it sets up, starts every program, keeps it running, and stops
them all."""

import ctypes
import json
import os
import re
import shlex
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from engine.variables import misspelt
from scripts.runner.attach import served_models
from scripts.runner.data import (
    Running,
    Secrets,
    example_request,
    load_secrets,
    owning,
    prepare_data,
)
from scripts.runner.options import (
    GATEWAY_PORT,
    SAMPLE_DATABASE,
    Options,
    Program,
    UsageError,
    check_ports,
    default_data,
    engine_python,
    gateway_environment,
    known_settings,
    needs_of,
    parse_options,
    programs_of,
    response_days,
)
from scripts.setup import smollm2
from scripts.setup.install_needs import InstallError, install
from scripts.stack import (
    POLL_SECONDS,
    StartError,
    probe,
    python,
    signal_group,
    start,
    stop,
    url_of,
    wait_until_ready,
)

NUM_TURNS = 20_000
# The month ends when it is made; pages of the last hours are empty after that.
KEPT_SECONDS = 12 * 3600
MADE = "sample-made"
MOST_REASON_CHARS = 300
# What a program may take beyond its own grace, before it is killed.
MARGIN_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 1.0
STEADY_SECONDS = 60.0
MOST_ENDS = 5
URGENT_STATUS = 130
PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec, where the function below runs, nothing may be.
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel stop this process should the supervisor be killed."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def say(text: str) -> None:
    print(text, flush=True)


class Child:
    """One program over its lives. When it ends, it is started again, after growing pauses."""

    def __init__(self, program: Program, logs: Path) -> None:
        self.program = program
        self.log = logs / f"{program.name}.log"
        self.log.unlink(missing_ok=True)
        self._num_ends = 0
        self._due: float | None = None
        self._is_awaited = False
        self._start()

    def _start(self) -> None:
        """A new life's log goes on where the one before ended."""
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        self._started = time.monotonic()
        environment = {"PYTHONUNBUFFERED": "1"} | self.program.environment
        self.process = start(
            self.program.command, environment, self.log, before_exec=die_with_parent, append=True
        )

    def epitaph(self) -> str:
        """How the program ended, in its own words, and where more is written."""
        status = self.process.returncode
        how = f"ended with status {status}"
        if status < 0:
            memory = ", as when memory runs out" if status == -signal.SIGKILL else ""
            how = f"was killed ({signal.Signals(-status).name}{memory})"
        # Who is killed from outside says nothing of it: the log's last error is of something else.
        is_told = status not in (-signal.SIGKILL, -signal.SIGTERM)
        reason = last_words(self.log, self._log_begins) if is_told else ""
        return f"{how}: {reason}" if reason else how

    def wait(self, others: Sequence["Child"]) -> None:
        """Wait until the program is ready, and tell its progress. Raises StartError if a child
        ends."""
        name = self.program.name
        probe_url = self.program.probe_url
        if probe_url is None:
            return
        try:
            wait_until_ready(
                probe_url,
                self.process,
                ready="",
                log=self.log,
                others=[child.process for child in others],
                say=lambda stage: say(f"    {name}: {stage}"),
            )
        except StartError:
            for child in (self, *others):
                if child.process.poll() is not None:
                    raise StartError(
                        f"the {child.program.name} {child.epitaph()} (its log: {child.log})"
                    ) from None
            raise
        say(f"    {name} is ready ({time.monotonic() - self._started:.1f} s)")

    def look(self) -> None:
        """Look at the program, and do what is due. Raises StartError if it ended too often."""
        now = time.monotonic()
        name = self.program.name
        if self._due is not None:
            if now >= self._due:
                signal_group(self.process, signal.SIGTERM)  # its helpers may hold its port
                self._start()
                self._due = None
                self._is_awaited = True
        elif self.process.poll() is not None:
            self._num_ends = 1 if now - self._started >= STEADY_SECONDS else self._num_ends + 1
            if self._num_ends >= MOST_ENDS:
                raise StartError(
                    f"the {name} ended {MOST_ENDS} times in a row; at last it "
                    f"{self.epitaph()} (its log: {self.log})"
                )
            pause = FIRST_PAUSE_SECONDS * 2 ** (self._num_ends - 1)
            self._due = now + pause
            again = f"started again in {pause:.0f} s{self.program.loss}"
            say(f"    the {name} {self.epitaph()}; {again}")
        elif self._is_awaited and self._is_ready():
            self._is_awaited = False
            say(f"    the {name} is ready again")

    def _is_ready(self) -> bool:
        probe_url = self.program.probe_url
        return probe_url is None or probe(probe_url).ready

    def end(self, is_urgent: Callable[[], bool]) -> None:
        """Ask it to end, give it its own grace and a margin, then kill what is left of its group.

        If that takes long, say what it waits for. If it gets urgent, kill the program at once.
        """
        signal_group(self.process, signal.SIGTERM)
        name = self.program.name
        grace = self.program.grace_seconds
        began = time.monotonic()
        is_told = False
        while self.process.poll() is None and not is_urgent():
            spent = time.monotonic() - began
            if spent > grace + MARGIN_SECONDS:
                say(f"    the {name} did not stop in {spent:.0f} s and was killed")
                break
            if spent > 2 and not is_told:
                is_told = True
                say(
                    f"    the {name} lets its running requests end, for {grace:.0f} s at most; "
                    "Ctrl-C again cuts them off"
                )
            time.sleep(POLL_SECONDS)
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()


def last_words(log: Path, begins: int = 0) -> str:
    """One line that says why a program ended, from its log behind `begins`; "" if no line does.

    It is the error of the last JSON line that has one, all lines of a list of wrong settings, or
    the last line.
    """
    text = log.read_bytes()[begins:].decode(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if re.match(r"[A-Z]+_[A-Z_]+: ", line)]
    # Behind a JSON line that tells no error, such as "ready", nothing was said.
    reasons = reasons or [line for line in lines[-1:] if not line.startswith("{")]
    for line in reversed(lines):
        try:
            reasons = [json.loads(line)["error"]]
        except (ValueError, KeyError, TypeError):
            continue
        break
    reason = " ".join("; ".join(map(str, reasons)).split())
    return reason if len(reason) <= MOST_REASON_CHARS else reason[:MOST_REASON_CHARS] + " …"


class Stopped(Exception):
    """Somebody asked the programs to stop."""


class Signals:
    """The first signal raises Stopped. Later ones only say that it is urgent."""

    def __init__(self) -> None:
        self.is_urgent = False
        self.was_asked = False

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.was_asked:
            self.is_urgent = True
            return
        self.was_asked = True
        raise Stopped(signal.Signals(number).name)


def run_step(module: str, words: list[str], environment: Mapping[str, str], log: Path) -> str:
    """Run one of our commands to its end. Return why it failed, or "" if it did not."""
    process = start([*python(module), *words], environment, log, before_exec=die_with_parent)
    try:
        status = process.wait()
    finally:
        stop(process)
    return f"{last_words(log)} (its log: {log})" if status else ""


def own_id(entries: Sequence[Mapping[str, Any]]) -> str:
    """The first id of a model itself: OpenAI's list has a `root` for aliases and adapters."""
    models = [entry["id"] for entry in entries if not entry.get("root")]
    return str([*models, *(entry["id"] for entry in entries)][0])


def served_model(options: Options, key: str) -> str:
    """Ask the gateway for the id to use in the printed request."""
    url = options.gateway_url + "/v1/models"
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as reply:
            return own_id(json.load(reply)["data"])
    except urllib.error.HTTPError as refusal:
        if refusal.code == 403:
            raise StartError(
                f"`--data {options.data}` has a database of sample data, which serves no turns; "
                "name another --data, or see the sample with `scripts/run --sample`"
            ) from refusal
        raise StartError(f"{url} answered {refusal.code}: {refusal.read(300)!r}") from refusal
    except OSError as error:
        raise StartError(f"{url} does not answer: {error}") from error


def print_summary(options: Options, keys: Secrets) -> None:
    """Print the summary. Its request is in a file, because its marked system prompt would fill the
    screen."""
    example = options.data / "example-request.json"
    example.write_text(example_request(served_model(options, keys.api_key)), "utf-8")
    gateways = "  ".join(url_of(options.port + i) for i in range(options.gateways))
    engines = "  ".join(options.engine_urls)
    dashboard = f"\n  dashboard  {options.dashboard_url}  (sign in with either key)"
    days = response_days()
    keeping = (
        f"kept for {days} day{'' if days == '1' else 's'}, encrypted, so that clients can go on "
        "with them"
        if days != "0"
        else "not kept"
    )
    demo = ["scripts/demo"]
    if options.port != GATEWAY_PORT:
        demo += ["--port", str(options.port)]
    if options.data != default_data(options.port):
        demo += ["--data", str(options.data)]
    say(f"""
Holdfast is running; Ctrl-C stops it.

  gateway    {gateways}
  engine     {engines}  ({options.engine}){dashboard if options.dashboard else ""}
  API key    {keys.api_key}
  admin key  {keys.admin_key}
  responses  {keeping} (HOLDFAST_RESPONSE_DAYS)

Try it (a marked system prompt; run it twice: the second reads what the first wrote):

curl {options.gateway_url}/v1/messages \\
  -H 'x-api-key: {keys.api_key}' \\
  -H 'anthropic-version: 2023-06-01' \\
  -H 'content-type: application/json' \\
  -d {shlex.quote(f"@{example}")}

Or see in a minute what a lease is worth, in another terminal: {shlex.join(demo)}
""")


def print_sample_summary(options: Options, keys: Secrets) -> None:
    say(f"""
A made-up month is shown, with simulated engines; Ctrl-C stops it. Nothing of it was measured.

  dashboard  {options.dashboard_url}
  admin key  {keys.admin_key}  (sign in with it)

Turns are served by `scripts/run` without --sample.
""")


def serve(options: Options, signals: Signals) -> None:
    """Raises StartError and UsageError, each with one line that says what to do."""
    engine_python(options.engine, os.environ)
    if options.attached:
        models = served_models(options.attached, options.secret)
        # The model that `claude-*` ids mean, if they are served.
        options = replace(options, model=models[0] if models else None)
    logs = prepare_data(options.data)
    dashboard = options.dashboard_url if options.dashboard else None
    running = Running(pid=os.getpid(), gateway=options.gateway_url, dashboard=dashboard)
    with owning(options.data, running):
        for line in misspelt(os.environ, known_settings()):
            say(f"==> warning: {line}")
        keys = load_secrets(options.data, os.environ)
        programs = programs_of(options, keys)
        check_ports(programs, options)
        install(needs_of(options, os.environ))
        if options.model is not None and smollm2.must_be_made(options.model):
            say("==> fetching SmolLM2-135M-Instruct (93 MB) and converting it, a minute or two")
            why = run_step("scripts.setup.smollm2", [options.model], {}, logs / "model.log")
            if why:
                raise StartError(f"SmolLM2 can't be made: {why}")
        environment = gateway_environment(options, keys, 0)
        marker = options.data / MADE
        is_made = marker.exists() and time.time() - marker.stat().st_mtime < KEPT_SECONDS
        if options.sample and not is_made:  # no real turn is ever in these files
            for file in (marker, *options.data.glob(f"{SAMPLE_DATABASE}*")):
                file.unlink(missing_ok=True)
        label = re.sub(r"//.*@", "//", environment["HOLDFAST_DATABASE_URL"])  # without its password
        say(f"==> migrating {label}")
        why = run_step("gateway", ["migrate"], environment, logs / "migrate.log")
        if why:
            raise StartError(f"the database {label} can't be used: {why}")
        if options.sample and not is_made:
            say(f"==> making up {NUM_TURNS:,} turns of 30 days, half a minute or so")
            words = ["--turns", str(NUM_TURNS)]
            why = run_step("scripts.sample", words, environment, logs / "sample.log")
            if why:
                raise StartError(f"the sample month can't be made: {why}")
            marker.touch()
        keep(options, keys, programs, logs, signals)


def keep(
    options: Options, keys: Secrets, programs: list[Program], logs: Path, signals: Signals
) -> None:
    """Start the programs side by side and keep them until a signal comes or one ends too often."""
    children: list[Child] = []
    try:
        say(f"==> starting {', '.join(program.name for program in programs)}; logs in {logs}")
        for program in programs:
            children.append(Child(program, logs))
        for child in children:
            child.wait(children)
        (print_sample_summary if options.sample else print_summary)(options, keys)
        while True:
            for child in children:
                child.look()
            time.sleep(POLL_SECONDS)
    finally:
        signals.was_asked = True  # another signal only makes it urgent
        if children:
            say("==> stopping")
        # In reverse: nobody loses what it still needs to finish its own work.
        for child in reversed(children):
            child.end(lambda: signals.is_urgent)


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
        whose = f": {error.filename}" if error.filename else ""
        print(f"run: {error.strerror or error}{whose}", file=sys.stderr)
        return 1
    return 0
