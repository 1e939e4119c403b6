"""Run agents one after the other, each before a gateway and a scripted engine of its own.

A conversation is a prompt, calls that the script makes, and a last text. The figures are the
ledger's, from the admin API; the refusals are those that a relay before the gateway saw.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import httpx

from scripts import stack
from scripts.stack import (
    ADMIN_KEY,
    API_KEY,
    ROOT,
    Server,
    engine_environment,
    free_port,
    serving_engine,
    serving_gateway,
)
from tests.agents.recipes import LAST_TEXT, MODEL, Recipe, call
from tests.agents.relay import Exchange, Relay, relaying
from tests.conformance.engines import VLLM_ON_CPU
from tests.e2e.prompts import png
from tests.engine.backends.vllm.models import write_idefics
from tests.scripted_engine import CUT, settings_of

NUM_TURNS = 5
LAST_OF_FIRST_RUN = 7
LAST_OF_SECOND_RUN = 9
NUM_WITH_MISHAPS = 11
MOST_RUNS = 12
"""A client may end a run at each mishap; another run carries on."""
SECONDS = 240
CLOSE_SECONDS = 20.0
PROMPT = "Do the steps, one after the other."
TOKENS = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
)
NOT_INSTALLED = "not installed"
CONTEXT = 65_536
_PICTURE = re.compile(rb"iVBORw0KGgo|/9j/|UklGR")
"""How base64 of a PNG, JPEG or WebP begins: some clients write a picture anew."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client's run came to.

    `share` is tokens read over tokens of the prompts in turns 2 to n of the conversation, or None
    where there are none; `beside` counts turns outside of it, such as one for a title.
    `lengths` are the tokens of the conversation's prompts, turn by turn.
    """

    recipe: Recipe
    version: str
    has_ended_well: bool
    turns: int = 0
    beside: int = 0
    share: float | None = None
    lengths: Sequence[int] = ()
    refusals: Sequence[Exchange] = field(default_factory=list)
    printed: str = ""

    @property
    def is_installed(self) -> bool:
        return self.version != NOT_INSTALLED

    @property
    def is_shorter(self) -> bool:
        """Whether a prompt is shorter than the one before it: compacted, or begun anew."""
        return any(later < earlier for earlier, later in pairwise(self.lengths))

    @property
    def asked(self) -> list[Exchange]:
        """The refusals of what the client needs."""
        return [exchange for exchange in self.refusals if exchange.path not in self.recipe.may_miss]

    @property
    def is_good(self) -> bool:
        is_read = (self.share or 0.0) >= self.recipe.least_read
        is_compacted = self.is_shorter or not (self.recipe.compact or self.recipe.shrinks)
        return self.has_ended_well and is_read and is_compacted and not self.asked

    @property
    def line(self) -> str:
        """A row of the table in Markdown."""
        if not self.is_installed:
            return f"| {self.recipe.name} | {self.version} | | | | |"
        paths = sorted({f"{exchange.status} {exchange.path}" for exchange in self.asked})
        refusals = f"{len(self.asked)}: {', '.join(paths)}" if paths else "0"
        share = "–" if self.share is None else f"{self.share:.1%}"
        beside = f" + {self.beside}" if self.beside else ""
        works = "yes" if self.has_ended_well else "**did not end**"
        works += ", compacted" if self.is_shorter else ""
        cells = (self.recipe.name, self.version, works, refusals, f"{self.turns}{beside}", share)
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| client | version | unmodified, to its end | refusals | turns | read in turns 2 to n |\n"
    "|---|---|---|---|---|---|"
)


def script_of(recipe: Recipe) -> dict[str, str]:
    """What the engine writes, by turn: calls, and a last text where a run ends."""
    if not recipe.tool:
        return {"": recipe.last}
    num_runs = 1 + len(recipe.resumed)
    num_turns = num_turns_of(recipe)
    ends = {num_turns * number // num_runs for number in range(1, num_runs + 1)}
    if recipe.mishaps:
        compacted = range(LAST_OF_SECOND_RUN + 1, num_turns - 1)
        ends = {LAST_OF_FIRST_RUN, LAST_OF_SECOND_RUN, *compacted, num_turns}
    steps: dict[str, str] = {}
    for number in range(1, num_turns + 1):
        arguments = json.loads(json.dumps(recipe.given).replace("$step", str(number)))
        steps[f"turn {number}"] = recipe.last if number in ends else call(recipe.tool, arguments)
    return {**steps, **mishaps_of(recipe, steps)} if recipe.mishaps else steps


def mishaps_of(recipe: Recipe, steps: dict[str, str]) -> dict[str, str]:
    """What goes wrong, by turn."""
    whole = steps["turn 3"]
    return {
        "turn 2": steps["turn 2"] * 2,
        "turn 3": whole[: len(whole) * 3 // 4] + CUT,
        "turn 4": steps["turn 4"] if recipe.strict else call("no_such_tool", {"where": "nowhere"}),
        "turn 5": call(recipe.tool, recipe.failing),
        "turn 6": call(recipe.picture_tool or recipe.tool, recipe.picture or recipe.given),
    }


def num_turns_of(recipe: Recipe) -> int:
    return NUM_WITH_MISHAPS + recipe.compact_turns if recipe.mishaps else NUM_TURNS


@contextmanager
def seeing_engine(data: Path, script: dict[str, str]) -> Iterator[Server]:
    """The scripted engine on vLLM, whose model sees images."""
    model = data.parent / MODEL
    model.mkdir()
    settings = {
        **VLLM_ON_CPU,
        "SCRIPTED_SCRIPT": json.dumps(script),
        "ENGINE_MODEL": str(write_idefics(model, max_position_embeddings=CONTEXT)),
        "ENGINE_NUM_BLOCKS": str(2 * CONTEXT // 32),
        "ENGINE_BLOCK_SIZE": "32",
        "ENGINE_VLLM_ARGS": json.dumps({"max_model_len": CONTEXT}),
    }
    port = free_port()
    command = [os.environ["VLLM_PYTHON"], "-m", "tests.agents.seeing_engine"]
    environment = engine_environment(port, settings)
    with stack.serving(command, environment, port, log=data.parent / "engine.log") as server:
        yield server


@contextmanager
def serving(
    data: Path, script: dict[str, str], *, sees: bool = False
) -> Iterator[tuple[Relay, Callable[[], str]]]:
    """A relay before a gateway before the scripted engine, and what starts the gateway anew."""
    settings = {
        **settings_of(str(ROOT / "engine" / "holdfast-demo"), script),
        "ENGINE_SYNTHETIC_PREFILL_US": "1",
        "ENGINE_SYNTHETIC_DECODE_MS": "0",
    }
    logs = data.parent
    # Responses are kept as `scripts/run` does it.
    gateway_settings = {"HOLDFAST_CLAUDE_ALIAS": "true", "HOLDFAST_RESPONSE_DAYS": "1"}
    with (
        seeing_engine(data, script)
        if sees
        else serving_engine(
            "synthetic", settings, logs / "engine.log", module="tests.scripted_engine"
        ) as engine,
        ExitStack() as gateways,
    ):
        engine.wait()

        def start() -> str:
            """End the gateway that runs, start another on its data, and say where it is."""
            gateways.close()
            log = logs / "gateway.log"
            gateway = serving_gateway(data, [engine.url], gateway_settings, log)
            return gateways.enter_context(gateway).wait().url

        with relaying(start()) as relay:
            yield relay, start


def run_one(recipe: Recipe, folder: Path) -> Outcome:
    """Run one client to its end. A client that fails is an outcome, not an error."""
    version = recipe.version(folder)
    if version is None or (recipe.sees and "VLLM_PYTHON" not in os.environ):
        return Outcome(recipe, NOT_INSTALLED, has_ended_well=False)
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        script = {
            turn: text.replace("$work", str(room / "work"))
            for turn, text in script_of(recipe).items()
        }
        with serving(room / "data", script, sees=recipe.sees) as (relay, start):

            def restart() -> None:
                relay.target = start()

            if recipe.mishaps:
                relay.before_turn(LAST_OF_FIRST_RUN + 1, restart)
            status, printed = execute(recipe, folder, room, relay)
            rows = settled(relay.target)
    return judge(recipe, version, relay.exchanges, rows, status, printed)


Run = Callable[[tuple[str, ...]], tuple[int, str]]
"""Runs a command; returns its exit status and what was printed."""


def execute(recipe: Recipe, folder: Path, room: Path, relay: Relay) -> tuple[int, str]:
    """The exit status and what was printed; a client that does not end is ended."""
    home = room / "home"
    work = room / "work"
    home.mkdir()
    work.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    known = {
        "url": relay.url,
        "key": API_KEY,
        "home": str(home),
        "work": str(work),
        "agents": str(folder),
        "programs": str(ROOT / "tests" / "clients" / "programs"),
        "prompt": PROMPT,
        "port": str(free_port()),
    }

    (work / "picture.png").write_bytes(png(224, 224))
    rules = (f"Rule {number}: form {number * 7} is due." for number in range(200))
    (work / "rules.md").write_text("\n".join(rules))

    def filled(text: str) -> str:
        return Template(text).safe_substitute(known)

    for name, text in recipe.files.items():
        path = Path(filled(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(text))
    places = (folder / recipe.place, folder)
    environment = {
        "PATH": ":".join([*(f"{place}/node_modules/.bin" for place in places), os.environ["PATH"]]),
        "HOME": str(home),
        "NO_PROXY": "*",
        "no_proxy": "*",
        "TERM": "dumb",
        **({"MISHAPS": "1", "PICTURE": str(work / "picture.png")} if recipe.mishaps else {}),
        **{name: filled(value) for name, value in recipe.environment.items()},
    }

    def run(command: tuple[str, ...]) -> tuple[int, str]:
        words = [filled(part) for part in command]
        return run_command(words, work, environment, filled(recipe.typed))

    runs = run_with_mishaps(recipe, relay, run) if recipe.mishaps else run_all(recipe, run)
    printed = ""
    status = 0
    try:
        for run_status, output in runs:
            status = run_status
            printed += output
    finally:
        if recipe.after:
            run(recipe.after)
    return status, printed


def run_all(recipe: Recipe, run: Run) -> Iterator[tuple[int, str]]:
    for command in (recipe.before, recipe.command, *recipe.resumed):
        status, output = run(command) if command else (0, "")
        yield status, output
        if status != 0:
            return


def run_with_mishaps(recipe: Recipe, relay: Relay, run: Run) -> Iterator[tuple[int, str]]:
    """A run that a mishap ended is carried on by another."""
    if recipe.before:
        yield run(recipe.before)
    yield run(recipe.command)
    for last in (LAST_OF_FIRST_RUN, LAST_OF_SECOND_RUN, num_turns_of(recipe)):
        if recipe.compact and last == num_turns_of(recipe):
            yield run(recipe.compact)
        for _ in range(MOST_RUNS if recipe.resumed else 0):
            if relay.num_turns >= last:
                break
            yield run(recipe.resumed[0])


def run_command(
    words: list[str], work: Path, environment: dict[str, str], typed: str
) -> tuple[int, str]:
    """The exit status, -1 where it did not end in SECONDS, and what was printed."""
    try:
        process = subprocess.run(
            words,
            cwd=work,
            env=environment,
            input=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
        return -1, f"{output}\nnot over in {SECONDS} s"
    return process.returncode, process.stdout


def settled(url: str) -> list[Row]:
    """The turns of the ledger, oldest first, when no more come."""
    before: list[Row] = []
    ends = time.monotonic() + CLOSE_SECONDS
    while time.monotonic() < ends:
        answer = httpx.get(
            f"{url}/admin/v1/turns", headers={"x-api-key": ADMIN_KEY}, timeout=60, trust_env=False
        )
        rows: list[Row] = answer.raise_for_status().json()
        if rows and len(rows) == len(before):
            return sorted(rows, key=lambda row: row["opened_ms"])
        before = rows
        time.sleep(1.0)
    return before


def judge(
    recipe: Recipe,
    version: str,
    exchanges: Sequence[Exchange],
    rows: Sequence[Row],
    status: int,
    printed: str,
) -> Outcome:
    # The id of an answer is its turn's, behind the dialect's own prefix.
    offering = [exchange.answer for exchange in exchanges if exchange.has_tools or not recipe.tool]
    talk = [row for row in rows if any(hex_of(row) in answer for answer in offering)]
    prompts = sum(row[name] for row in talk[1:] for name in TOKENS)
    read_tokens = sum(row["cache_read_tokens"] for row in talk[1:])
    is_picture_sent = any(_PICTURE.search(exchange.body) for exchange in exchanges)
    has_seen = [
        bool(_PICTURE.search(exchange.body)) for exchange in exchanges if exchange.has_tools
    ]
    is_shown = all(has_seen[1:]) and not any(
        "not shown to" in exchange.answer for exchange in exchanges
    )
    lengths = [sum(row[name] for name in TOKENS) for row in talk]
    return Outcome(
        recipe,
        version,
        has_ended_well=status == 0
        and (is_shown or not recipe.sees)
        and (is_picture_sent or not recipe.picture)
        and printed.count(LAST_TEXT) > len(recipe.resumed)
        and len(talk) >= num_turns_of(recipe),
        turns=len(talk),
        beside=len(rows) - len(talk),
        share=read_tokens / prompts if prompts else None,
        lengths=lengths,
        refusals=[exchange for exchange in exchanges if exchange.is_refused],
        printed=printed,
    )


def hex_of(row: Row) -> str:
    return str(row["id"]).rpartition("_")[2]
