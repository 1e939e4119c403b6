"""An engine mounted into `vllm serve`: leases, forgery, ends and kills, counted.

    python -m tests.faults.plugin --python PYTHON [--kills 3] [--forged 1000] [--beside JSON]

Starts `vllm serve` with the plugin, and a gateway before it. What the clients were told is compared
with the ledger in the end. Ends with 1 unless every row of the table is as it should be.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from scripts.stack import (
    ENGINE_SECRET,
    ROOT,
    Process,
    free_port,
    gateway_environment,
    python,
    run,
    start,
    stop,
    url_of,
    wait_until_ready,
)
from tests.conformance.engines import CONNECTOR, MOUNT, VLLM_ON_CPU, vllm_serve
from tests.e2e.fleet import Gateway
from tests.e2e.kills import Killed, backlog
from tests.e2e.sdk_clients import SdkClients
from tests.faults.forgery import BODIES, Forgeries, untried, words
from tests.gateway.records import ledger_rows

MODEL = "holdfast-demo"
NUM_BLOCKS = 256
BLOCK_SIZE = 32
LOSS_SECONDS = 30
SIZES: dict[str, str | int | float] = {
    "NUM_BLOCKS": NUM_BLOCKS,
    "BLOCK_SIZE": BLOCK_SIZE,
    "MIN_CACHE_TOKENS": 64,
    "VLLM_ARGS": '{"max_model_len": 4096}',
}
MODELS_TOML = f"""default = "{MODEL}"

[[models]]
id = "{MODEL}"
engine_model = "{MODEL}"
min_cache_tokens = 64
"""


@dataclass
class Findings:
    """Rows of the table: what was looked at, what was seen, whether it is as it should be."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def note(self, what: str, value: object, is_right: bool) -> None:
        self.rows.append((what, str(value), is_right))
        print(f"{'ok ' if is_right else 'NOT'} {what}: {value}", flush=True)


class Plugged:
    """A `vllm serve` with the plugin on one port, started again and again."""

    def __init__(self, interpreter: str, log: Path, beside: str = "") -> None:
        """`beside`: the `--kv-transfer-config` of a connector that stands in one with ours."""
        os.environ["VLLM_PYTHON"] = interpreter
        self.port = free_port()
        self._log = log
        self._beside = beside
        self.url = url_of(self.port)
        self.process: Process
        self.start()

    def start(self) -> None:
        command, environment = vllm_serve(self.port, SIZES, is_mounted=True)
        command += ["--enable-prompt-tokens-details", "--enable-scale-out"]
        if self._beside:
            children = {"connectors": [CONNECTOR, json.loads(self._beside)]}
            both = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": children,
            }
            command += ["--kv-transfer-config", json.dumps(both)]
        self.process = start(
            command, VLLM_ON_CPU | environment, self._log, before_exec=lambda: None
        )
        wait_until_ready(self.url, self.process, f"{MOUNT}/readyz", self._log)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._get("stats")
        return stats

    def entries(self, state: str) -> int:
        """How many the mounted engine says are so."""
        return sum(entry["state"] == state for entry in self._get("entries"))

    def _get(self, what: str) -> Any:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        answer = httpx.get(f"{self.url}{MOUNT}/v1/{what}", headers=headers, timeout=60)
        return answer.raise_for_status().json()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def marked_turn(gateway: str, seed: int = 1) -> dict[str, Any]:
    """A turn whose system prompt is marked; its usage."""
    asking = Gateway(gateway, model=MODEL)
    usage: dict[str, Any] = asking.answer(words(seed, 250), "Say something.", max_tokens=8)["usage"]
    return usage


def look_at_leases(vllm: Plugged, gateway: str, findings: Findings) -> None:
    first = marked_turn(gateway)
    second = marked_turn(gateway)
    written_tokens = first["cache_creation_input_tokens"]
    findings.note("turn 1 writes", written_tokens, written_tokens > 0)
    read_tokens = second["cache_read_input_tokens"]
    findings.note("turn 2 reads what turn 1 wrote", read_tokens, read_tokens == written_tokens)
    flooded = flood(vllm, 3 * NUM_BLOCKS * BLOCK_SIZE)
    read_tokens = marked_turn(gateway)["cache_read_input_tokens"]
    findings.note(
        f"read after {flooded} tokens through vLLM's own route",
        read_tokens,
        read_tokens == written_tokens,
    )


def flood(vllm: Plugged, tokens: int) -> int:
    """So many tokens of unmarked prompts through vLLM's own route; how many they were."""
    flooded = 0
    while flooded < tokens:
        body = {
            "model": MODEL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": words(1000 + flooded, 450)}],
        }
        answer = httpx.post(f"{vllm.url}/v1/chat/completions", json=body, timeout=300)
        flooded += answer.raise_for_status().json()["usage"]["prompt_tokens"]
    return flooded


def look_at_losses(vllm: Plugged, gateway: str, findings: Findings) -> None:
    """More entries than may be leased; others then take the blocks of those without a lease."""
    for seed in range(2, 14):
        marked_turn(gateway, seed)
    leased = vllm.entries("leased")
    loose = vllm.entries("best_effort")
    findings.note("entries with a lease, and without", (leased, loose), leased > 0 < loose)
    flood(vllm, 3 * NUM_BLOCKS * BLOCK_SIZE)
    until = time.monotonic() + LOSS_SECONDS
    while vllm.entries("best_effort") and time.monotonic() < until:
        time.sleep(0.1)
    entries_after = vllm.entries("leased"), vllm.entries("best_effort")
    findings.note(
        "the same after a flood by others, without a turn",
        entries_after,
        entries_after == (leased, 0),
    )


def look_at_forgery(vllm: Plugged, count: int, findings: Findings) -> None:
    forgeries = Forgeries()
    before = vllm.stats()
    with httpx.Client(base_url=vllm.url, timeout=120) as client:
        missing = untried(client)
        forgeries.send(client, MODEL, count)
    after = vllm.stats()
    findings.note("routes that take kv_transfer_params and were not tried", missing, not missing)
    answered = {
        route: f"{forgeries.answered[route]} of {sent}" for route, sent in forgeries.sent.items()
    }
    # vLLM itself fails on every text and list that `vllm_xargs` can carry in the parameter's place.
    is_tried = all(forgeries.answered[path] for path in BODIES if path in forgeries.sent)
    findings.note("forged requests answered with 200, by route", answered, is_tried)
    findings.note(
        "forged requests that failed with a 5xx for our key only",
        forgeries.failed,
        forgeries.failed == 0,
    )
    more_blocks = after["leases"]["blocks"] - before["leases"]["blocks"]
    entries = after["num_entries"] - before["num_entries"]
    findings.note(
        f"blocks and entries held for {count} forged ones",
        (more_blocks, entries),
        (more_blocks, entries) == (0, 0),
    )


async def under_load(
    vllm: Plugged, gateway: Killed, kills: int, findings: Findings, clients: SdkClients
) -> None:
    """Ends of both sides while clients stream; each side is started again after its end."""
    running = asyncio.create_task(clients.run(8))
    ends: list[tuple[str, Callable[[], object]]] = [
        ("SIGTERM of vLLM", lambda: stop(vllm.process)),
        ("kill -9 of vLLM", vllm.kill),
        ("kill -9 of the gateway", gateway.kill),
        ("SIGTERM of the gateway", gateway.stop),
    ]
    for number in range(kills):
        for what, end in ends:
            await clients.begun(8)
            at = asyncio.get_running_loop().time()
            await asyncio.to_thread(end)
            seconds = asyncio.get_running_loop().time() - at
            findings.note(
                f"{what}, {number + 1}: seconds to its end", f"{seconds:.1f}", seconds < 30
            )
            side = vllm if "vLLM" in what else gateway
            await asyncio.to_thread(side.start)
    await clients.begun(8)
    clients.stopping.set()
    await running
    while backlog(gateway.url) or gateway.open_turns():
        await asyncio.sleep(0.2)


def compare(clients: SdkClients, ledger: str, findings: Findings) -> None:
    rows = {row["id"]: row for row in ledger_rows(ledger)}
    lost = [answer.turn_id for answer in clients.told.values() if answer.turn_id not in rows]
    wrong = [
        answer.turn_id
        for answer in clients.told.values()
        if answer.turn_id in rows
        and any(rows[answer.turn_id][name] != value for name, value in answer.usage.items())
    ]
    findings.note(
        f"turns told to clients that have no row, of {len(clients.told)}", len(lost), not lost
    )
    findings.note("rows that differ from what the client was told", len(wrong), not wrong)


@contextmanager
def stack(interpreter: str, folder: Path, beside: str) -> Iterator[tuple[Plugged, Killed, str]]:
    models = folder / "models.toml"
    models.write_text(MODELS_TOML, "utf-8")
    vllm = Plugged(interpreter, folder / "vllm.log", beside)
    port = free_port()
    home = folder / "gateway"
    settings = gateway_environment(port, home, [vllm.url + MOUNT], {"HOLDFAST_MODELS": str(models)})
    run([*python("gateway"), "migrate"], settings)
    gateway = Killed(home, settings, url_of(port))
    try:
        yield vllm, gateway, f"sqlite:///{home / 'ledger.db'}"
    finally:
        stop(gateway.process, vllm.process)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--forged", type=int, default=1000)
    about = "the --kv-transfer-config of another connector, in a MultiConnector with ours"
    parser.add_argument("--beside", default="", metavar="JSON", help=about)
    options = parser.parse_args()
    findings = Findings()
    with TemporaryDirectory(prefix="plugin-") as directory:
        with stack(str(Path(options.python).absolute()), Path(directory), options.beside) as (
            vllm,
            gateway,
            ledger,
        ):
            look_at_leases(vllm, gateway.url, findings)
            look_at_losses(vllm, gateway.url, findings)
            look_at_forgery(vllm, options.forged, findings)
            clients = SdkClients(gateway.url, MODEL, 30, random.Random(1))
            asyncio.run(under_load(vllm, gateway, options.kills, findings, clients))
            compare(clients, ledger, findings)
    bad = [what for what, _, is_right in findings.rows if not is_right]
    print("all as it should be" if not bad else f"NOT as it should be: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
