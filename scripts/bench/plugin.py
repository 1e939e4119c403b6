"""What the plugin costs the other clients of a `vllm serve`: their throughput with it and without.

Two servers with the same flags stand side by side: without a connector, and with the plugin and a
gateway before it. `--idle` adds one with a connector that does nothing. `--again` adds a second one
without a connector: two equal servers differ by a percent or two for as long as they run, and
`--add` puts the rounds of several starts together. Short rounds of the same requests through
`/v1/completions` go to the servers in turns, in a drawn order, so that whatever else the machine
does meets all of them alike. All prompts of a round come in one body, so that its steps are the
same on each server.

Printed are medians of the ratios of a round, and the 95 % interval of each median: tokens a second,
and the processor time (the kernel's, in nanoseconds) that vLLM's core and worker took for a token.
The routes' own process is left out: nothing of ours is in the way of other clients there. The
smaller a model's step, the larger our share of it: the demo model's steps take a few milliseconds,
and `--model medium` is a random one whose steps take about as long as those of a model on a GPU.
The room of the pool suffices, so the memory that leases hold is no part of it.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from scripts.bench.report import machine_line, median_interval, table, verdict
from scripts.setup.options import parse
from scripts.stack import (
    API_HEADERS,
    ENGINE_SECRET,
    HOST,
    ROOT,
    family,
    free_port,
    serving_gateway,
    start,
    stop,
    url_of,
    wait_until_ready,
)
from tests.conformance.engines import MOUNT, VLLM_ON_CPU

BLOCKS, BLOCK_TOKENS = 512, 32
PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS = 96, 32, 8
LIMIT = 1.01
"""What is to be shown: with the plugin other clients' requests take one percent more at most."""
FULL = 0.9
PLAIN, IDLE, PLUGIN = "no connector", "a connector that does nothing", "the plugin"
AGAIN = "no connector, again"
"""A second server like the first: what two equal processes differ by."""
CONNECTORS = {
    IDLE: {
        "kv_connector": "IdleConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "scripts.bench.idle_connector",
    },
    PLUGIN: {"kv_connector": "HoldfastConnector", "kv_role": "kv_producer"},
}


CORE_NAMES = (b"VLLM::EngineCore", b"VLLM::Worker")
Cost = tuple[float, float]
"""Of one round: seconds, and processor seconds of vLLM's core."""
Round = dict[str, Cost]


@dataclass(frozen=True, slots=True)
class Subject:
    kind: str
    url: str
    pid: int


@contextmanager
def serving_vllm(
    interpreter: Path, model: Path, kinds: Sequence[str], logs: Path
) -> Iterator[list[Subject]]:
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
            command = [str(interpreter.with_name("vllm")), "serve", str(model), "--enforce-eager"]
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


def run_round(subject: Subject, draw: random.Random) -> Cost:
    """One round of requests, after which the server has nothing to do."""
    prompts = [[draw.randrange(20, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
    sampling = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    body = {"model": "m", "prompt": prompts, **sampling}
    used, since = core_seconds(subject.pid), time.perf_counter()
    answer = httpx.post(f"{subject.url}/v1/completions", json=body, timeout=300)
    seconds = time.perf_counter() - since
    written = answer.raise_for_status().json()["usage"]["completion_tokens"]
    assert written == REQUESTS * OUTPUT_TOKENS
    return seconds, core_seconds(subject.pid) - used


def core_seconds(pid: int) -> float:
    """Processor seconds so far of vLLM's core and worker: a server's processes of those names."""
    nanoseconds = 0
    for one in family(pid):
        try:
            if not Path(f"/proc/{one}/cmdline").read_bytes().startswith(CORE_NAMES):
                continue
            for thread in Path(f"/proc/{one}/task").iterdir():
                nanoseconds += int((thread / "schedstat").read_text().split()[0])
        except OSError:
            continue  # a process or a thread that has just ended
    assert nanoseconds, "no process of the server is vLLM's core"
    return nanoseconds / 1e9


def medium_model(folder: Path) -> Path:
    """A model with random weights, about 45 million; the demo model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    demo = ROOT / "engine" / "demo_model"
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocabulary = json.loads((demo / "config.json").read_text("utf-8"))["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    kind: Any = LlamaForCausalLM  # it has no types
    kind(config).save_pretrained(folder)
    return folder


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


def report(rounds: Sequence[Round], leases: str) -> None:
    rows = []
    tokens = REQUESTS * OUTPUT_TOKENS
    pairs = [(PLUGIN, kind) for kind in rounds[0] if kind != PLUGIN]
    if AGAIN in rounds[0]:
        pairs.append((AGAIN, PLAIN))
    for this, other in pairs:
        rates = [each[other][0] / each[this][0] for each in rounds]
        costs = [each[this][1] / each[other][1] for each in rounds]
        more = [1e6 * (each[this][1] - each[other][1]) / tokens for each in rounds]
        cells = [
            "{:.4f} ({:.4f} to {:.4f})".format(*median_interval(values))
            for values in (rates, costs)
        ]
        more_cell = "{:+.1f} ({:+.1f} to {:+.1f})".format(*median_interval(more))
        most = median_interval(costs)[2]
        shown = f"{verdict(most <= LIMIT)}: {most - 1:+.2%} at most"
        rows.append([this, f"{other}, leases {leases}", *cells, more_cell, shown])
    head = [
        f"{len(rounds)} rounds",
        "against",
        "throughput",
        "processor time",
        "µs a token",
        "one percent",
    ]
    print(table(head, rows))


def main() -> int:
    options = parse(
        __doc__,
        python=(str(ROOT / ".venv-vllm" / "bin" / "python"), "of a vLLM with the plugin"),
        minutes=(8.0, "of rounds"),
        model=("demo", "what computes", ("demo", "medium")),
        leases=("empty", "what leases hold of their budget", ("empty", "full")),
        idle=(False, "a server more, with a connector that does nothing"),
        again=(False, "a server more, without a connector: what equal servers differ by"),
        add=("", "a file of rounds: these are added to it, and all are reported"),
        seed=0,
    )
    # Told to end, it still ends the servers that it started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    draw = random.Random(options.seed or os.urandom(8))
    kept = Path(options.add) if options.add else None
    rounds: list[Round] = json.loads(kept.read_text("utf-8")) if kept and kept.exists() else []
    with tempfile.TemporaryDirectory(prefix="plugin-") as work, ExitStack() as stack:
        folder = Path(work)
        is_demo = options.model == "demo"
        model = ROOT / "engine" / "demo_model" if is_demo else medium_model(folder / "medium")
        more = [
            kind for kind, is_asked in ((IDLE, options.idle), (AGAIN, options.again)) if is_asked
        ]
        kinds = (PLAIN, *more, PLUGIN)
        servers = serving_vllm(Path(options.python).absolute(), model, kinds, folder)
        subjects = stack.enter_context(servers)
        mounted = subjects[-1]
        gateway = stack.enter_context(serving_gateway(folder, [mounted.url + MOUNT]))
        gateway.wait()
        if options.leases == "full":
            fill_leases(mounted, gateway.url, draw)
        for subject in subjects * 3:  # warms them up
            run_round(subject, draw)
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            order = random.sample(subjects, len(subjects))
            rounds.append({each.kind: run_round(each, draw) for each in order})
            if kept is not None:
                kept.write_text(json.dumps(rounds), "utf-8")
        share = leased_share(mounted)
    what = f"{options.model} model, float32; leases hold {share:.0%} of what they may"
    print(f"\n{machine_line()}; {what}\n")
    report(rounds, options.leases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
