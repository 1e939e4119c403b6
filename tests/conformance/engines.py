"""Engines as processes, and the protocol's client: what every conformance test talks through."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec
import pytest

from engine.protocol import (
    SCOPE_HEADER,
    Breakpoint,
    CancelReply,
    ClockReply,
    CountReply,
    CountRequest,
    Done,
    DropReply,
    EntryState,
    Failed,
    FinalCounts,
    Finished,
    Frame,
    GenerateRequest,
    GuaranteeName,
    InputUsage,
    Message,
    Name,
    Part,
    Prompt,
    Sampling,
    Snapshot,
    Started,
    TextDelta,
    TextPart,
    Ttl,
)
from engine.protocol.reports import Description, EntryInfo, Stats
from scripts.stack import (
    ENGINE_SECRET,
    HOST,
    ROOT,
    Process,
    free_port,
    python,
    serving,
    wait_until_ready,
)

T = TypeVar("T")

SECRET = ENGINE_SECRET
BLOCK_SIZE = 16
MOUNT = "/holdfast"
# Half of the pool for leases, as an engine of its own has; what others share has a quarter.
CONNECTOR = {
    "kv_connector": "HoldfastConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"lease_share": 0.5},
}
TICK = 1 / 1024  # the manual clock stays exact: it is moved by sums of powers of two only

Settings = Mapping[str, str | int | float]
COMMON: Settings = {"CLOCK": "manual", "MIN_CACHE_TOKENS": 32, "BLOCK_SIZE": BLOCK_SIZE}
STEADY = {**COMMON, "NUM_BLOCKS": 4096, "MAX_STEP_TOKENS": 64, "MAX_WAITING": 4}
# An engine that computes is slow by itself; the synthetic one is as slow as it is told to be.
PROFILES: dict[str, Settings] = {
    "fast": {**STEADY, "SYNTHETIC_PREFILL_US": 0, "SYNTHETIC_DECODE_MS": 0},
    "slow": {**STEADY, "SYNTHETIC_PREFILL_US": 1000, "SYNTHETIC_DECODE_MS": 20},
    "tiny": {
        **COMMON,
        "NUM_BLOCKS": 16,
        "SYNTHETIC_PREFILL_US": 0,
        "SYNTHETIC_DECODE_MS": 5,
    },
}
# Tests compute on a CPU, in one thread, without a hub; what the environment says goes before it.
VLLM_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def frames_of(lines: Iterator[str]) -> Iterator[Frame]:
    decoder = msgspec.json.Decoder(Frame)
    return (decoder.decode(line) for line in lines if line)


def prompt(*texts: str, system: tuple[str, ...] = ()) -> Prompt:
    """System blocks, then one user message of these parts."""
    parts: list[Part] = [TextPart(text) for text in texts]
    return Prompt(messages=[Message("user", parts)], system=[TextPart(text) for text in system])


@dataclass
class Answer:
    """All frames of one generation."""

    frames: list[Frame]

    @property
    def started(self) -> Started:
        assert isinstance(self.frames[0], Started), self.frames[0]
        return self.frames[0]

    @property
    def usage(self) -> InputUsage:
        return self.started.usage

    @property
    def finished(self) -> list[Finished]:
        return [frame for frame in self.frames if isinstance(frame, Finished)]

    @property
    def last(self) -> Done | Failed:
        assert isinstance(self.frames[-1], Done | Failed)
        return self.frames[-1]

    def text(self, choice: int = 0) -> str:
        deltas = (frame for frame in self.frames if isinstance(frame, TextDelta))
        return "".join(delta.text for delta in deltas if delta.choice == choice)


@dataclass
class Stream:
    """A generation that is read as it comes."""

    request_id: str
    response: httpx.Response
    frames: Iterator[Frame]

    def start(self) -> Started:
        first = next(self.frames)
        assert isinstance(first, Started), first
        return first

    def rest(self) -> Answer:
        return Answer(list(self.frames))


@dataclass
class Engine:
    """One running engine. `scope` makes a new, unused scope."""

    url: str
    process: Process
    client: httpx.Client
    _numbers: Iterator[int] = field(default_factory=count)

    @cached_property
    def description(self) -> Description:
        return self.get("describe", Description)

    def wait_until_ready(self) -> "Engine":
        wait_until_ready(self.url, self.process)
        return self

    def has(self, capability: str) -> bool:
        return capability in self.description.capabilities

    def keeps(self, guarantee: GuaranteeName) -> bool:
        return any(g.name == guarantee and g.is_kept for g in self.description.guarantees)

    def require(self, guarantee: GuaranteeName) -> None:
        """Skip the test on an engine that does not keep this promise."""
        if not self.keeps(guarantee):
            pytest.skip(f"does not declare {guarantee}")

    def promised(self, seconds: float) -> float | None:
        """What a report says of an entry's end: only a lease promises one."""
        return seconds if self.keeps("hold") else None

    @property
    def written_state(self) -> EntryState:
        """What an entry is while there is room for its lease."""
        return "leased" if self.keeps("hold") else "best_effort"

    def scope(self) -> str:
        return uuid4().hex

    def floor(self, tokens: int) -> int:
        return tokens - tokens % self.description.granularity

    def get(self, path: str, kind: type[T], **parameters: Any) -> T:
        response = self.client.get(f"/v1/{path}", params=parameters)
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=kind)

    def post(self, path: str, body: Any, kind: type[T]) -> T:
        headers = {SCOPE_HEADER: quote(body.scope)} if isinstance(body, CountRequest) else {}
        content = msgspec.json.encode(body)
        response = self.client.post(f"/v1/{path}", content=content, headers=headers)
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=kind)

    def count(self, prompt: Prompt) -> CountReply:
        return self.post("count", CountRequest("counts", prompt), CountReply)

    def ends(self, prompt: Prompt) -> list[int]:
        """Where entries may sit at each segment's end."""
        return [self.floor(end or 0) for end in self.count(prompt).segment_tokens]

    def text(self, num_tokens: int) -> str:
        """New text of about this many tokens, never more."""
        letters = f"{next(self._numbers):x}".translate(
            {ord(c): chr(ord("a") + i) for i, c in enumerate("0123456789abcdef")}
        )
        words = [f" {letters}{'aeiou'[i % 5]}{'bcdfg'[i // 5 % 5]}" for i in range(num_tokens)]
        empty = self.count(prompt("")).input_tokens
        used = self.count(prompt("".join(words))).input_tokens - empty
        return "".join(words[: max(num_tokens * len(words) // max(used, 1) - 2, 1)])

    def request(
        self,
        prompt: Prompt,
        scope: str,
        *marks: tuple[int, Ttl] | int,
        max_tokens: int | None = 1,
        names: tuple[Name, ...] = (),
        request_id: str | None = None,
        minimum: int | None = 1,
        seconds: float | None = None,
        salt: str = "",
        **sampling: Any,
    ) -> GenerateRequest:
        points = [mark if isinstance(mark, tuple) else (mark, "5m") for mark in marks]
        return GenerateRequest(
            request_id=request_id or uuid4().hex,
            scope=scope,
            prompt=prompt,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, **sampling),
            breakpoints=[Breakpoint(segment, ttl, seconds) for segment, ttl in points],
            names=list(names),
            min_cache_tokens=minimum,
            salt=salt,
        )

    def ask(self, prompt: Prompt, scope: str, *marks: tuple[int, Ttl] | int, **more: Any) -> Answer:
        """A whole generation."""
        with self.stream(self.request(prompt, scope, *marks, **more)) as stream:
            return Answer(list(stream.frames))

    @contextmanager
    def stream(self, request: GenerateRequest) -> Iterator[Stream]:
        body = msgspec.json.encode(request)
        headers = {SCOPE_HEADER: quote(request.scope)}
        with self.client.stream("POST", "/v1/generate", content=body, headers=headers) as response:
            if response.status_code != 200:
                raise Refused(response.status_code, response.read())
            yield Stream(request.request_id, response, frames_of(response.iter_lines()))

    def advance(self, seconds: float) -> float:
        return self.post("clock/advance", {"seconds": seconds}, ClockReply).now

    def stats(self) -> Stats:
        return self.get("stats", Stats)

    def snapshot(self) -> Snapshot:
        return self.get("snapshot", Snapshot)

    def entries(self, scope: str) -> list[EntryInfo]:
        return [entry for entry in self.get("entries", list[EntryInfo]) if entry.scope == scope]

    def page(self, scope: str, after: str, limit: int) -> list[EntryInfo]:
        """The entries of a scope that follow one, in the order of their ids."""
        return self.get("entries", list[EntryInfo], scope=scope, after=after, limit=limit)

    def cancel(self, request_id: str) -> bool:
        return self.post("cancel", {"request_id": request_id}, CancelReply).cancelled

    def drop(self, scope: str, entry: str | None = None) -> int:
        return self.post("drop", {"scope": scope, "entry": entry}, DropReply).dropped

    def unacknowledged(self) -> dict[str, FinalCounts]:
        counts = self.get("unacknowledged", list[FinalCounts])
        return {final.request_id: final for final in counts}

    def acknowledge(self, *request_ids: str) -> None:
        reply = self.client.post("/v1/ack", json={"request_ids": list(request_ids)})
        assert (reply.status_code, reply.content) == (204, b"")

    def wait_until_idle(self, seconds: float = 180.0) -> float:
        """Until nothing runs and no sequence holds a block; how long that took."""
        since = time.monotonic()
        while True:
            stats = self.stats()
            if not (stats.running or stats.waiting or stats.blocks.active):
                return time.monotonic() - since
            assert time.monotonic() - since < seconds, "the engine does not come to rest"
            time.sleep(0.005)


class Refused(Exception):
    """A call that was answered with an error before the stream."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status} {body!r}")
        self.status = status
        # A server that is cut off in its stop answers in plain text.
        is_json = body.startswith(b"{")
        self.reply: dict[str, Any] = msgspec.json.decode(body) if is_json else {}


@contextmanager
def running_engine(backend: str, settings: Settings, module: str = "engine") -> Iterator[Engine]:
    """Start `python -m engine`, wait until it is ready, end it whatever happens.

    Another `module` than `engine` is the synthetic engine with more to it, and has no options.
    With VLLM_MOUNTED=1 an engine on vLLM is one mounted into a `vllm serve`.
    """
    with _started_engine(backend, settings, module) as engine:
        yield engine.wait_until_ready()


@contextmanager
def running_engines(backend: str, settings: Sequence[Settings]) -> Iterator[list[Engine]]:
    """One engine for each of the settings; they start at the same time."""
    with ExitStack() as stack:
        engines = [stack.enter_context(_started_engine(backend, options)) for options in settings]
        yield [engine.wait_until_ready() for engine in engines]


@contextmanager
def _started_engine(backend: str, settings: Settings, module: str = "engine") -> Iterator[Engine]:
    port = free_port()
    base = {key: value for key, value in os.environ.items() if not key.startswith("ENGINE_")}
    base = {"OMP_NUM_THREADS": "1"} | base
    environment = {f"ENGINE_{name}": str(value) for name, value in settings.items()}
    environment |= {"ENGINE_SECRET": SECRET, "ENGINE_PORT": str(port), "ENGINE_LOG_LEVEL": "error"}
    command = python(module) + (["--backend", backend] if module == "engine" else [])
    mount = ""
    if backend == "vllm":
        command[0] = os.environ["VLLM_PYTHON"]
        base = VLLM_ON_CPU | base
    if backend == "vllm" and os.environ.get("VLLM_MOUNTED"):
        command, environment = vllm_serve(port, settings, is_mounted=True)
        mount = MOUNT
    if backend == "upstream" and "UPSTREAM_SLOTS" not in settings:
        environment = {n: v for n, v in environment.items() if n[7:] not in OF_VLLM}
    with ExitStack() as stack:
        environment |= stack.enter_context(_upstream_of(backend, settings))
        server = stack.enter_context(serving(command, environment, port, base=base))
        client = httpx.Client(
            base_url=server.url + mount,
            headers={"authorization": f"Bearer {SECRET}"},
            timeout=120,
            limits=httpx.Limits(max_connections=None),
        )
        with client:
            yield Engine(server.url + mount, server.process, client)


@contextmanager
def _upstream_of(backend: str, settings: Settings) -> Iterator[dict[str, str]]:
    """For the backend `upstream`: a `vllm serve` without our plugin, and where it is.

    UPSTREAM_URL names a server that runs already.
    """
    if backend != "upstream" or "UPSTREAM" in settings:
        yield {}
        return
    if url := os.environ.get("UPSTREAM_URL"):
        yield {"ENGINE_UPSTREAM": url}
        return
    port = free_port()
    command, environment = vllm_serve(port, settings, is_mounted=False)
    with serving(command, environment, port, base=VLLM_ON_CPU | dict(os.environ)) as server:
        wait_until_ready(server.url, server.process, "/health")
        yield {"ENGINE_UPSTREAM": server.url}


OF_VLLM = frozenset({"VLLM_ARGS", "NUM_BLOCKS", "BLOCK_SIZE", "MAX_STEP_TOKENS", "DTYPE"})
"""What sizes an engine: vLLM's own flags, where it is not ours to start."""


def vllm_serve(
    port: int,
    settings: Settings,
    *,
    is_mounted: bool,
    transfer: Mapping[str, Any] = CONNECTOR,
) -> tuple[list[str], dict[str, str]]:
    """A `vllm serve` with the plugin and `transfer`, its connectors.

    Without the plugin it tells what it reused.
    """
    arguments = json.loads(str(settings["VLLM_ARGS"]))
    flags: dict[str, object] = {
        "served-model-name": "holdfast-demo",
        "host": HOST,
        "port": port,
        "dtype": settings.get("DTYPE", "float32"),
        "block-size": settings["BLOCK_SIZE"],
        "num-gpu-blocks-override": int(settings["NUM_BLOCKS"]) + 1,  # one is vLLM's null block
        "max-model-len": arguments["max_model_len"],
        "limit-mm-per-prompt": json.dumps(arguments.get("limit_mm_per_prompt", {})),
        "max-num-seqs": 32,
        "structured-outputs-config.backend": "guidance",
    }
    if is_mounted:
        flags["kv-transfer-config"] = json.dumps(transfer)
    if "MAX_STEP_TOKENS" in settings:
        flags["max-num-batched-tokens"] = settings["MAX_STEP_TOKENS"]
    command = [str(Path(os.environ["VLLM_PYTHON"]).with_name("vllm")), "serve"]
    command += [str(settings.get("MODEL", ROOT / "engine" / "holdfast-demo")), "--enforce-eager"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if not is_mounted:
        return [*command, "--enable-prompt-tokens-details"], {"VLLM_PLUGINS": ""}
    ours = settings.keys() - OF_VLLM - {"MODEL"}
    environment = {f"ENGINE_{name}": str(settings[name]) for name in ours}
    return command, {**environment, "VLLM_PLUGINS": "holdfast", "ENGINE_SECRET": SECRET}
