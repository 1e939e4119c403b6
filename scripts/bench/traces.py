"""What traces cost: CPU time of the gateway's and of the engine's process for a turn.

`python -m scripts.bench.traces [--rounds N] [--turns N] [--grpc]` runs four stacks beside each
other, each a gateway and a synthetic engine whose model takes no time:

- absent: traces off, and OpenTelemetry can't be imported, as where the extra is not installed;
- off: traces off, with OpenTelemetry installed;
- on: every turn has spans, and a collector takes them;
- one in ten: every tenth turn is sampled.

Each round sends the same turns to each stack, in an order that changes from round to round. CPU
time is read from the kernel in ns for all threads of a process, so that other programs on the
machine change it little. What is told is the median of the rounds, and the median of the
differences to `absent` in the same round, with the interval that has it with 95 %. At the end the
spans of one turn are printed, in their order over both processes.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from scripts.bench.collector import Collector, collecting, collecting_grpc, transcript
from scripts.bench.report import machine_line, table
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, Stack, running_stack

PROMPT = "The lamp is lit at dusk and put out at dawn. " * 40
WARM_UP = 40
ENGINE = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "0"}
# The first of these on the path is taken for OpenTelemetry, and does not import.
BLOCKED = 'raise ImportError("OpenTelemetry is not installed")\n'


@dataclass
class Subject:
    """A stack, and its ns of CPU time for a turn in each round, by process."""

    name: str
    stack: Stack
    gateway: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)


def cpu_ns(pid: int) -> int:
    """CPU time of a process's living threads."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def settings_of(name: str, collector: Collector, is_grpc: bool, blocked: Path) -> dict[str, str]:
    """The environment of both processes. A setting of the other program is ignored by each."""
    if name == "absent":
        return {"PYTHONPATH": str(blocked)}
    if name == "off":
        return {}
    sampled = {} if name == "on" else {"OTEL_TRACES_SAMPLER_ARG": "0.1"}
    if sampled:
        sampled["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
    return {
        **sampled,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if is_grpc else "http/protobuf",
    }


@contextmanager
def running(
    folder: Path, names: list[str], is_grpc: bool
) -> Iterator[tuple[list[Subject], Collector]]:
    blocked = folder / "blocked"
    (blocked / "opentelemetry").mkdir(parents=True)
    (blocked / "opentelemetry" / "__init__.py").write_text(BLOCKED, "utf-8")
    with ExitStack() as stacks:
        collector = stacks.enter_context(collecting_grpc() if is_grpc else collecting())
        subjects = []
        for name in names:
            shared = settings_of(name, collector, is_grpc, blocked)
            is_on = "true" if "OTEL_EXPORTER_OTLP_ENDPOINT" in shared else "false"
            data = folder / name.replace(" ", "-")
            data.mkdir()
            engine = {**ENGINE, **shared, "ENGINE_TRACES": is_on}
            gateway = {**shared, "HOLDFAST_TRACES": is_on}
            made = running_stack(data, "synthetic", engine, gateway, data)
            subjects.append(Subject(name, stacks.enter_context(made)))
        yield subjects, collector


def send(url: str, turns: int, headers: Mapping[str, str] | None = None) -> None:
    system = [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}]
    said = [{"role": "user", "content": "When is it lit?"}]
    body = {"model": "synthetic", "max_tokens": 16, "system": system, "messages": said}
    with httpx.Client(
        base_url=url, headers={**API_HEADERS, **(headers or {})}, timeout=120
    ) as http:
        for _ in range(turns):
            http.post("/v1/messages", json=body).raise_for_status()


def measure(subject: Subject, turns: int) -> None:
    pids = subject.stack.gateway_process.pid, subject.stack.engine_process.pid
    before = [cpu_ns(pid) for pid in pids]
    send(subject.stack.gateway, turns)
    # What the turns left to do: spans that wait for their batch, and the ledger.
    time.sleep(1.0)
    spent = [(cpu_ns(pid) - was) / turns for pid, was in zip(pids, before, strict=True)]
    subject.gateway.append(spent[0])
    subject.engine.append(spent[1])


def interval(values: list[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with 95 % (normal approximation)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = round(len(values) / 2 - half), round(len(values) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def rows_of(subjects: list[Subject]) -> list[list[str]]:
    rows = []
    for process in ("gateway", "engine"):
        base: list[float] = getattr(subjects[0], process)
        for subject in subjects:
            values: list[float] = getattr(subject, process)
            more = [one - other for one, other in zip(values, base, strict=True)]
            low, high = interval(more)
            median = statistics.median(values)
            rows.append(
                [
                    f"{process}, {subject.name}",
                    f"{median / 1e6:.3f}",
                    f"{statistics.median(more) / 1e3:+.0f}",
                    f"{low / 1e3:+.0f} to {high / 1e3:+.0f}",
                    f"{statistics.median(more) / statistics.median(base):+.1%}",
                ]
            )
    return rows


def spans_of_one_turn(subject: Subject, collector: Collector) -> str:
    trace = os.urandom(16).hex()
    send(subject.stack.gateway, 1, {"traceparent": f"00-{trace}-{os.urandom(8).hex()}-01"})
    deadline = time.monotonic() + 30
    while len(collector.trace(trace)) < 7 and time.monotonic() < deadline:
        time.sleep(0.1)
    return transcript(collector.trace(trace))


def main() -> int:
    options = parse(
        __doc__,
        rounds=(20, "rounds, each with every stack"),
        turns=(100, "turns of a stack in a round"),
        grpc=(False, "send the spans by gRPC"),
    )
    names = ["absent", "off", "on", "one in ten"]
    print(machine_line())
    with (
        TemporaryDirectory(prefix="traces-") as folder,
        running(Path(folder), names, options.grpc) as (subjects, collector),
    ):
        for subject in subjects:
            send(subject.stack.gateway, WARM_UP)
        for number in range(options.rounds):
            first = number % len(subjects)
            for subject in subjects[first:] + subjects[:first]:
                measure(subject, options.turns)
        headings = ["process, traces", "ms of CPU a turn", "more, us", "95 %", "share"]
        print(table(headings, rows_of(subjects)))
        print(f"\n{len(collector.spans):,} spans came to the collector.\n")
        print(spans_of_one_turn(subjects[names.index("on")], collector))
    return 0


if __name__ == "__main__":
    sys.exit(main())
