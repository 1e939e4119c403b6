"""What the plugin costs the other clients of a `vllm serve`: their throughput with it and without.

Three servers with the same flags stand side by side: without a connector, with one that does
nothing, and with the plugin and a gateway before it. Rounds of the same requests through
`/v1/completions` go to them in turns, in a drawn order, so that other programs of the machine slow
all of them alike. Printed are medians of the ratios of a round, of tokens a second and of processor
time a token, with the 95 % interval of that median. The room of the pool suffices in all of them,
so the memory that leases hold is no part of it.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.bench.report import machine_line, median_interval, table
from scripts.options import parse
from scripts.stack import (
    API_HEADERS,
    ENGINE_SECRET,
    HOST,
    ROOT,
    cpu_seconds,
    free_port,
    serving_gateway,
    start,
    stop,
    url_of,
    wait_until_ready,
)
from tests.conformance.engines import MOUNT, VLLM_ON_CPU

BLOCKS, BLOCK_TOKENS = 512, 32
PROMPT_TOKENS, OUTPUT_TOKENS = 224, 64
REQUESTS, CONCURRENCY = 24, 8
FULL = 0.9
PLAIN, IDLE, PLUGIN = "no connector", "a connector that does nothing", "the plugin"
CONNECTORS = {
    IDLE: {
        "kv_connector": "IdleConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "scripts.bench.idle_connector",
    },
    PLUGIN: {"kv_connector": "HoldfastConnector", "kv_role": "kv_producer"},
}


@dataclass(frozen=True, slots=True)
class Subject:
    kind: str
    url: str
    pid: int


@contextmanager
def serving_vllm(interpreter: Path, kinds: Sequence[str], logs: Path) -> Iterator[list[Subject]]:
    """They start at the same time."""
    ports = {kind: free_port() for kind in kinds}
    with ExitStack() as stack:
        processes = {}
        for number, kind in enumerate(kinds):
            flags: dict[str, object] = {
                "served-model-name": "m",
                "host": HOST,
                "port": ports[kind],
                "dtype": "float32",
                "block-size": BLOCK_TOKENS,
                "num-gpu-blocks-override": BLOCKS + 1,
                "max-model-len": 2048,
                "max-num-seqs": 16,
                "structured-outputs-config.backend": "guidance",
            }
            if kind in CONNECTORS:
                flags["kv-transfer-config"] = json.dumps(CONNECTORS[kind])
            words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
            model = str(ROOT / "engine" / "demo_model")
            command = [str(interpreter.with_name("vllm")), "serve", model, "--enforce-eager"]
            environment = {
                **VLLM_ON_CPU,
                "VLLM_PLUGINS": "holdfast" if kind == PLUGIN else "",
                "ENGINE_SECRET": ENGINE_SECRET,
                "ENGINE_MIN_CACHE_TOKENS": "64",
                "PYTHONPATH": str(ROOT),
            }
            process = start([*command, *words], environment, logs / f"{number}.log")
            stack.callback(stop, process)
            processes[kind] = process
        for number, (kind, process) in enumerate(processes.items()):
            ready = f"{MOUNT}/readyz" if kind == PLUGIN else "/health"
            wait_until_ready(url_of(ports[kind]), process, ready, logs / f"{number}.log")
        yield [Subject(kind, url_of(ports[kind]), processes[kind].pid) for kind in kinds]


async def run_round(subject: Subject, draw: random.Random) -> tuple[float, float]:
    """Seconds, and processor seconds of the server, for one round."""
    prompts = [[draw.randrange(20, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=subject.url, timeout=300, limits=limits) as client:

        async def ask(prompt: list[int]) -> None:
            sampling = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
            body = {"model": "m", "prompt": prompt, **sampling}
            answer = await client.post("/v1/completions", json=body)
            written = answer.raise_for_status().json()["usage"]["completion_tokens"]
            assert written == OUTPUT_TOKENS

        since, used = time.monotonic(), cpu_seconds(subject.pid)
        await asyncio.gather(*map(ask, prompts))
        return time.monotonic() - since, cpu_seconds(subject.pid) - used


def leased_share(subject: Subject) -> float:
    """Blocks that leases hold, of those that they may."""
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    answer = httpx.get(f"{subject.url}{MOUNT}/v1/stats", headers=headers, timeout=60)
    leases = answer.raise_for_status().json()["leases"]
    return float(leases["blocks"] / leases["max_blocks"])


def fill_leases(subject: Subject, gateway: str, draw: random.Random) -> None:
    """Marked turns of an hour's lease until hardly another fits."""
    while leased_share(subject) < FULL:
        text = " ".join(f"w{draw.randrange(1000)}" for _ in range(120))
        mark = {"type": "ephemeral", "ttl": "1h"}
        body = {
            "model": httpx.get(f"{gateway}/v1/models", headers=API_HEADERS).json()["data"][0]["id"],
            "max_tokens": 1,
            "system": [{"type": "text", "text": text, "cache_control": mark}],
            "messages": [{"role": "user", "content": "Go."}],
        }
        url = f"{gateway}/v1/messages"
        httpx.post(url, headers=API_HEADERS, json=body, timeout=120).raise_for_status()


Round = dict[str, tuple[float, float]]


def report(rounds: Sequence[Round], leases: str) -> None:
    rows = []
    for other in (PLAIN, IDLE):
        rates = [each[other][0] / each[PLUGIN][0] for each in rounds]
        costs = [each[PLUGIN][1] / each[other][1] for each in rounds]
        cells = [
            "{:.4f} ({:.4f} to {:.4f})".format(*median_interval(values))
            for values in (rates, costs)
        ]
        rows.append([f"{other}, leases {leases}", *cells])
    print(table([f"plugin against, {len(rounds)} rounds", "throughput", "processor time"], rows))


def main() -> int:
    options = parse(
        __doc__,
        python=(str(ROOT / ".venv-vllm" / "bin" / "python"), "of a vLLM with the plugin"),
        rounds=(8, "of every server"),
        leases=("empty", "or full"),
        add=("", "a file of rounds: these are added to it, and all are reported"),
        seed=0,
    )
    # Told to end, it still ends the servers that it started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    draw = random.Random(options.seed or os.urandom(8))
    kept = Path(options.add) if options.add else None
    rounds: list[Round] = json.loads(kept.read_text("utf-8")) if kept and kept.exists() else []
    with tempfile.TemporaryDirectory(prefix="plugin-") as work, ExitStack() as stack:
        servers = serving_vllm(Path(options.python).absolute(), (PLAIN, IDLE, PLUGIN), Path(work))
        subjects = stack.enter_context(servers)
        mounted = subjects[-1]
        gateway = stack.enter_context(serving_gateway(Path(work), [mounted.url + MOUNT]))
        gateway.wait()
        if options.leases == "full":
            fill_leases(mounted, gateway.url, draw)
        for number in range(-1, options.rounds):
            order = random.sample(subjects, len(subjects))
            seen = {each.kind: asyncio.run(run_round(each, draw)) for each in order}
            if number >= 0:  # the first warms them up
                rounds.append(seen)
                print(f"{number}: " + json.dumps(seen), flush=True)
                if kept is not None:
                    kept.write_text(json.dumps(rounds), "utf-8")
        share = leased_share(mounted)
    print(f"\n{machine_line()}; demo model, float32; leases hold {share:.0%} of what they may\n")
    report(rounds, options.leases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
