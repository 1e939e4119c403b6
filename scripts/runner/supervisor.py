"""The process behind `scripts/run`: sets up, starts every program, keeps it, and stops them all."""

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from scripts.runner.data import Running, Secrets, handbook, load_secrets, owning, prepare_data
from scripts.runner.model import check_model
from scripts.runner.options import (
    GATEWAY_PORT,
    MARGIN_SECONDS,
    Options,
    Program,
    UsageError,
    check_engine_args,
    check_ports,
    database_label,
    default_data,
    engine_python,
    gateway_environment,
    misspelt_settings,
    needs_of,
    parse_options,
    programs_of,
)
from scripts.runner.options import SAMPLE_DATABASE as DATABASE
from scripts.setup.install_needs import InstallError, install
from scripts.stack import (
    POLL_SECONDS,
    ROOT,
    StartError,
    insist,
    probe,
    python,
    signal_group,
    start,
    wait_until_ready,
)

NUM_TURNS = 20_000
# The month ends when it is made; pages of the last hours are empty after that.
KEPT_SECONDS = 12 * 3600
MADE = "sample-made"


def is_made(data: Path) -> bool:
    """Whether there is a month that ended some hours ago at most."""
    made = data / MADE
    return made.exists() and time.time() - made.stat().st_mtime < KEPT_SECONDS


def drop_month(data: Path) -> None:
    """No real turn is ever in these files."""
    for file in (data / MADE, *data.glob(f"{DATABASE}*")):
        file.unlink(missing_ok=True)


def make_month(data: Path, environment: Mapping[str, str], logs: Path) -> None:
    """Raises StartError where the month can't be written."""
    print(f"==> making up {NUM_TURNS:,} turns of 30 days, half a minute or so", flush=True)
    log, began = logs / "sample.log", time.monotonic()
    command = [*python("scripts.sample"), "--turns", str(NUM_TURNS)]
    process = start(command, environment, log, before_exec=die_with_parent)
    try:
        status = process.wait()
    finally:
        insist(process, 2)
    if status != 0:
        why = last_words(log)
        raise StartError(f"the sample month can't be made: {why} (its log: {log})")
    (data / MADE).touch()
    print(f"    made up in {time.monotonic() - began:.0f} s", flush=True)


MOST_REASON_CHARS = 300
PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec, where the function below runs, nothing may be.
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel stop this process should the supervisor be killed."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One started program. Its log goes on where an earlier life of it ended, if `again`."""

    def __init__(self, program: Program, logs: Path, *, again: bool = False) -> None:
        self.program = program
        self.log = logs / f"{program.name}.log"
        self._log_begins = self.log.stat().st_size if again and self.log.exists() else 0
        self.process = start(
            program.command,
            {"PYTHONUNBUFFERED": "1"} | program.environment,
            self.log,
            before_exec=die_with_parent,
            append=again,
        )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def epitaph(self) -> str:
        """How it ended, and why by its own words."""
        how = ended_how(self.process.returncode)
        said = last_words(self.log, self._log_begins)
        return f"{how}: {said}" if said else how

    def check(self) -> None:
        """Raises StartError where it does not run any more."""
        if self.has_ended:
            raise StartError(f"the {self.program.name} {self.epitaph()} (its log: {self.log})")

    def wait(self, others: list["Child"], say: Callable[[str], None]) -> None:
        """Wait until it is ready and tell its progress. Raises StartError where a child ends."""
        began, name = time.monotonic(), self.program.name
        try:
            wait_until_ready(
                self.program.url,
                self.process,
                self.program.ready,
                self.log,
                others=[child.process for child in others],
                say=lambda stage: say(f"    {name}: {stage}"),
            )
        except StartError:
            for child in (self, *others):
                child.check()
            raise
        say(f"    {name} is ready ({time.monotonic() - began:.1f} s)")

    def ask_to_stop(self) -> None:
        signal_group(self.process, signal.SIGTERM)

    def wait_stopped(self, is_urgent: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Wait for its own grace and a margin, then kill what is left of its group.

        Where it takes long, say what for; where it gets urgent, kill at once.
        """
        limit = self.program.grace_seconds + MARGIN_SECONDS
        began, is_told = time.monotonic(), False
        while self.process.poll() is None and not is_urgent():
            spent = time.monotonic() - began
            if spent > limit:
                say(f"    the {self.program.name} did not stop in {limit:.0f} s and was killed")
                break
            if spent > 2 and not is_told:
                is_told = True
                say(
                    f"    the {self.program.name} lets its running requests end, for "
                    f"{self.program.grace_seconds:.0f} s at most; Ctrl-C again cuts them off"
                )
            try:
                self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()


def ended_how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was killed ({name}{', as when memory runs out' if name == 'SIGKILL' else ''})"


def last_words(log: Path, begins: int = 0) -> str:
    """One line that says why a program ended, from its log behind `begins`; "" where none does.

    It is the error of the last JSON line that has one, all lines of a list of wrong settings, or
    the last line.
    """
    if not log.exists():
        return ""
    text = log.read_bytes()[begins:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("error"), str):
            return shortened(told["error"])
    settings = [line for line in lines if re.match(r"[A-Z]+_[A-Z_]+: ", line)]
    # Behind a JSON line that tells no error, such as "ready", nothing was said.
    plain = [line for line in lines[-1:] if not line.startswith("{")]
    return shortened("; ".join(settings or plain))


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_REASON_CHARS else line[:MOST_REASON_CHARS] + " …"


FIRST_PAUSE_SECONDS = 1.0
STEADY_SECONDS = 60.0
LIMIT = 5

Say = Callable[[str], None]


class Restarts:
    """When one program is started again. Times are seconds of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._started = now
        self.num_ends = 0

    def note_start(self, now: float) -> None:
        self._started = now

    def note_end(self, now: float) -> float | None:
        """The pause in seconds; None where it ended too often."""
        self.num_ends = 1 if now - self._started >= STEADY_SECONDS else self.num_ends + 1
        if self.num_ends >= LIMIT:
            return None
        pause: float = FIRST_PAUSE_SECONDS * 2 ** (self.num_ends - 1)
        return pause


class Kept:
    """A program and its present life. `due` is when it is started again, if it does not run."""

    def __init__(self, child: Child, logs: Path, say: Say) -> None:
        self.child = child
        self._logs, self._say = logs, say
        self._restarts = Restarts(time.monotonic())
        self._due: float | None = None
        self._is_awaited = False

    def look(self) -> None:
        """See how it is, and do what is due. Raises StartError where it ended too often."""
        now = time.monotonic()
        if self._due is not None:
            if now >= self._due:
                self._start(now)
        elif self.child.has_ended:
            self._take_end(now)
        elif self._is_awaited and probe(self.child.program.url + self.child.program.ready).ready:
            self._is_awaited = False
            self._say(f"    the {self.child.program.name} is ready again")

    def _take_end(self, now: float) -> None:
        program, pause = self.child.program, self._restarts.note_end(now)
        if pause is None:
            raise StartError(
                f"the {program.name} ended {LIMIT} times in a row; at last it "
                f"{self.child.epitaph()} (its log: {self.child.log})"
            )
        self._due = now + pause
        self._say(
            f"    the {program.name} {self.child.epitaph()}; started again in {pause:.0f} s"
            f"{program.loss}"
        )

    def _start(self, now: float) -> None:
        self.child.ask_to_stop()  # helpers of its last life may hold its port
        self.child = Child(self.child.program, self._logs, again=True)
        self._restarts.note_start(now)
        self._due, self._is_awaited = None, True


class Keeper:
    """All programs of one `scripts/run`, in the order in which they became ready."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._kept: list[Kept] = []

    @property
    def children(self) -> list[Child]:
        return [kept.child for kept in self._kept]

    def add(self, child: Child, logs: Path) -> None:
        self._kept.append(Kept(child, logs, self._say))

    def watch(self) -> None:
        """Return never: until a signal comes, or a program ends too often."""
        while True:
            for kept in self._kept:
                kept.look()
            time.sleep(POLL_SECONDS)

    def stop(self, is_urgent: Callable[[], bool]) -> None:
        """Stop in reverse: nobody loses what it still needs to finish its own work."""
        for child in reversed(self.children):
            child.ask_to_stop()
            child.wait_stopped(is_urgent, self._say)


class Stopped(Exception):
    """Somebody asked to stop."""


class Signals:
    """The first signal raises Stopped. Later ones only say that it is urgent."""

    def __init__(self) -> None:
        self.is_urgent = False
        self._was_asked = False

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def no_longer_raise(self) -> None:
        """Programs are being stopped: another signal only makes it urgent."""
        self._was_asked = True

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._was_asked:
            self.is_urgent = True
            return
        self._was_asked = True
        raise Stopped(signal.Signals(number).name)


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
            check_model(options.model, options.engine)
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
    if options.sample and not is_made(options.data):
        drop_month(options.data)
    migrate(environment, logs)
    if options.sample and not is_made(options.data):
        make_month(options.data, environment, logs)
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
