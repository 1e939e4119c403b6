"""An engine mounted into `vllm serve`: leases, forgery, ends and kills, counted.

    python -m scripts.faults.plugin --python .venv-vllm/bin/python [--kills 3] [--forged 1000]

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from scripts.stack import (
    API_HEADERS,
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
from tests.conformance.engines import MOUNT, VLLM_ON_CPU, mounted_vllm
from tests.e2e.kills import Killed, ledger_rows
from tests.e2e.streams import Clients

MODEL = "demo_model"
NUM_BLOCKS, BLOCK_SIZE = 256, 32
SIZES: dict[str, str | int | float] = {
    "NUM_BLOCKS": NUM_BLOCKS,
    "BLOCK_SIZE": BLOCK_SIZE,
    "MIN_CACHE_TOKENS": 64,
    "VLLM_ARGS": '{"max_model_len": 4096}',
}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses",
          "/inference/v1/generate")  # fmt: skip
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

    def note(self, what: str, seen: object, is_right: bool) -> None:
        self.rows.append((what, str(seen), is_right))
        print(f"{'ok ' if is_right else 'NOT'} {what}: {seen}", flush=True)


class Plugged:
    """A `vllm serve` with the plugin on one port, started again and again."""

    def __init__(self, interpreter: str, log: Path) -> None:
        os.environ["VLLM_PYTHON"] = interpreter
        self.port, self._log = free_port(), log
        self.url = url_of(self.port)
        self.process: Process
        self.start()

    def start(self) -> None:
        command, environment = mounted_vllm(self.port, SIZES)
        environment["ENGINE_SECRET"] = ENGINE_SECRET
        command += ["--enable-prompt-tokens-details", "--enable-scale-out"]
        self.process = start(
            command, VLLM_ON_CPU | environment, self._log, before_exec=lambda: None
        )
        wait_until_ready(self.url, self.process, f"{MOUNT}/readyz", self._log)

    def stats(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        answer = httpx.get(f"{self.url}{MOUNT}/v1/stats", headers=headers, timeout=60)
        stats: dict[str, Any] = answer.raise_for_status().json()
        return stats

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def words(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(
        f"{draw.choice('bcdfgklmnprst')}{draw.choice('aeiou')}{draw.randrange(99)}"
        for _ in range(count)
    )


def marked_turn(gateway: str) -> dict[str, Any]:
    """A turn whose system prompt is marked; its usage."""
    block = {"type": "text", "text": words(1, 250), "cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "max_tokens": 8,
        "system": [block],
        "messages": [{"role": "user", "content": "Say something."}],
    }
    answer = httpx.post(f"{gateway}/v1/messages", headers=API_HEADERS, json=body, timeout=300)
    usage: dict[str, Any] = answer.raise_for_status().json()["usage"]
    return usage


def look_at_leases(vllm: Plugged, gateway: str, findings: Findings) -> None:
    first, second = marked_turn(gateway), marked_turn(gateway)
    written = first["cache_creation_input_tokens"]
    findings.note("turn 1 writes", written, written > 0)
    read = second["cache_read_input_tokens"]
    findings.note("turn 2 reads what turn 1 wrote", read, read == written)
    flooded = 0
    while flooded < 3 * NUM_BLOCKS * BLOCK_SIZE:
        body = {
            "model": MODEL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": words(1000 + flooded, 450)}],
        }
        answer = httpx.post(f"{vllm.url}/v1/chat/completions", json=body, timeout=300)
        flooded += answer.raise_for_status().json()["usage"]["prompt_tokens"]
    read = marked_turn(gateway)["cache_read_input_tokens"]
    findings.note(f"read after {flooded} tokens through vLLM's own route", read, read == written)


def forged(draw: random.Random) -> Any:
    """`kv_transfer_params` as a client may forge them."""
    want = {"key": "ab" * 16, "tokens": draw.choice([32, 992, 10**9]), "expires_at": 9e18}
    ours: dict[str, Any] = {
        "request_id": draw.choice(["forged", "x/1"]),
        "scope": draw.choice(["x", ""]),
        "wants": [want] * draw.choice([0, 1, 20]),
        "watches": [{"key": "w", "tokens": 64}] * draw.choice([0, 2]),
        "read": draw.choice([None, "ab" * 16]),
        "token": draw.choice(["", "0" * 64, None, 7, "\ud800", ["x"]]),
    }
    for name in draw.sample(sorted(ours), draw.choice([0, 0, 1, 2])):
        del ours[name]
    return {"holdfast": draw.choice([ours, ours, ours, [ours], "x", 3])}


def forged_body(route: str, params: Any, draw: random.Random) -> dict[str, Any]:
    text = words(draw.randrange(50), 60)
    messages = [{"role": "user", "content": text}]
    common: dict[str, Any] = {"model": MODEL, "kv_transfer_params": params}
    if route == "/v1/completions":
        return {**common, "prompt": text, "max_tokens": 1}
    if route == "/v1/responses":
        return {**common, "input": text, "max_output_tokens": 1}
    if route == "/inference/v1/generate":
        ids = [20 + draw.randrange(3000) for _ in range(100)]
        return {**common, "token_ids": ids, "sampling_params": {"max_tokens": 1}}
    return {**common, "messages": messages, "max_tokens": 1}


def look_at_forgery(vllm: Plugged, count: int, findings: Findings) -> None:
    draw, statuses = random.Random(5), dict.fromkeys(ROUTES, 0)
    before, failed = vllm.stats(), 0
    with httpx.Client(base_url=vllm.url, timeout=120) as client:
        for index in range(count):
            route = ROUTES[index % len(ROUTES)]
            body = json.dumps(forged_body(route, forged(draw), draw))
            headers = {"content-type": "application/json"}
            answer = client.post(route, content=body, headers=headers)
            statuses[route] += answer.status_code == 200
            if answer.status_code >= 500:
                # vLLM itself fails on some of them, whoever they are for.
                others = body.replace('"holdfast"', '"another"')
                failed += client.post(route, content=others, headers=headers).status_code < 500
    after = vllm.stats()
    findings.note("forged requests that vLLM answered, by route", statuses, any(statuses.values()))
    findings.note("forged requests that failed with a 5xx for our key only", failed, failed == 0)
    more = after["leases"]["blocks"] - before["leases"]["blocks"]
    entries = after["num_entries"] - before["num_entries"]
    findings.note(
        f"blocks and entries held for {count} forged ones",
        (more, entries),
        (more, entries) == (0, 0),
    )


async def under_load(
    vllm: Plugged, gateway: Killed, kills: int, findings: Findings, clients: Clients
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
            begun = len(clients.told)
            while len(clients.told) < begun + 8:
                await asyncio.sleep(0.1)
            at = asyncio.get_running_loop().time()
            await asyncio.to_thread(end)
            seconds = asyncio.get_running_loop().time() - at
            findings.note(
                f"{what}, {number + 1}: seconds to its end", f"{seconds:.1f}", seconds < 30
            )
            side = vllm if "vLLM" in what else gateway
            await asyncio.to_thread(side.start)
    begun = len(clients.told)
    while len(clients.told) < begun + 8:
        await asyncio.sleep(0.1)
    clients.stopping.set()
    await running
    while httpx.get(f"{gateway.url}/readyz").json()["journal_backlog"] or gateway.open_turns():
        await asyncio.sleep(0.2)


def compare(clients: Clients, ledger: str, findings: Findings) -> None:
    rows = {row["id"]: row for row in ledger_rows(ledger)}
    lost = [told.turn_id for told in clients.told.values() if told.turn_id not in rows]
    wrong = [
        told.turn_id
        for told in clients.told.values()
        if told.turn_id in rows
        and any(rows[told.turn_id][name] != value for name, value in told.usage.items())
    ]
    findings.note(
        f"turns told to clients that have no row, of {len(clients.told)}", len(lost), not lost
    )
    findings.note("rows that differ from what the client was told", len(wrong), not wrong)


@contextmanager
def stack(interpreter: str, folder: Path) -> Iterator[tuple[Plugged, Killed, str]]:
    models = folder / "models.toml"
    models.write_text(MODELS_TOML, "utf-8")
    vllm = Plugged(interpreter, folder / "vllm.log")
    port, home = free_port(), folder / "gateway"
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
    options = parser.parse_args()
    findings = Findings()
    with TemporaryDirectory(prefix="plugin-") as directory:
        with stack(str(Path(options.python).absolute()), Path(directory)) as (
            vllm,
            gateway,
            ledger,
        ):
            look_at_leases(vllm, gateway.url, findings)
            look_at_forgery(vllm, options.forged, findings)
            clients = Clients(gateway.url, MODEL, 30, random.Random(1))
            asyncio.run(under_load(vllm, gateway, options.kills, findings, clients))
            compare(clients, ledger, findings)
    bad = [what for what, _, is_right in findings.rows if not is_right]
    print("all as it should be" if not bad else f"NOT as it should be: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
