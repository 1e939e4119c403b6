"""Many streams at once, whole and in order, then a mixture: does anything grow?

scripts/long_tests soak has 500 streams and 20 minutes.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import linear_regression

import httpx

from scripts.bench.load import MESSAGES, Answer, ask, body_of
from scripts.stack import API_HEADERS
from tests.e2e.fleet import Fleet, running_fleet
from tests.faults.sizes import number, told

ENGINE = {
    # So few that they are full well before the second half, of which growth is measured.
    "ENGINE_NUM_BLOCKS": "8192",
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_MAX_RUNNING": "1024",
    "ENGINE_MAX_WAITING": "4096",
    "ENGINE_SYNTHETIC_DECODE_MS": "50",
}
GATEWAY = {"HOLDFAST_QUEUE_SECONDS": "120"}
IDLE_SECONDS = 120.0
# Connections that are kept, and files that happen to be open.
SPARE_FDS = 8
MIB = 1 << 20
# Between two rounds of the same load: allocators keep some of what was freed.
MAX_ADDED_MIB = 16
MAX_MIB_AN_HOUR = 8
MAX_FDS_AN_HOUR = 8
# Odd, so that each goes through both of two gateways.
_HANDBOOKS = 31


@dataclass(frozen=True)
class Reading:
    """One look at one process: its resident bytes and its open descriptors.

    `active` counts an engine's blocks that sequences hold, `waiting` turns that are in a journal or
    that an engine has not been told to forget.
    """

    at: float
    rss: float
    fds: float
    active: float
    waiting: float


def values(text: str) -> dict[str, float]:
    """Every value of a page of Prometheus metrics, by its name with its labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def total(values_by_series: Mapping[str, float], name: str, label: str = "") -> float:
    """The sum over the series of a metric, those with this label."""
    return sum(
        value
        for series, value in values_by_series.items()
        if series.partition("{")[0] == name and label in series
    )


async def reading(http: httpx.AsyncClient, url: str) -> Reading:
    values_by_series = values((await http.get(f"{url}/metrics")).text)
    return Reading(
        at=time.monotonic(),
        rss=values_by_series["process_resident_memory_bytes"],
        fds=values_by_series["process_open_fds"],
        active=total(values_by_series, "holdfast_engine_kv_blocks", 'state="active"'),
        waiting=values_by_series.get("holdfast_gateway_journal_backlog", 0.0)
        + total(values_by_series, "holdfast_engine_unacknowledged"),
    )


async def readings(fleet: Fleet) -> dict[str, Reading]:
    processes = [*(gateway.url for gateway in fleet.gateways), *fleet.engines]
    async with client() as http:
        return {url: await reading(http, url) for url in processes}


async def idle_readings(
    fleet: Fleet, before: Mapping[str, Reading] | None = None
) -> dict[str, Reading]:
    """Read every process once nothing runs and nothing waits.

    With `before`, idle connections get time to end as well. Raises TimeoutError where something
    still runs after IDLE_SECONDS.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        by_url = await readings(fleet)
        is_idle = not any(process.active or process.waiting for process in by_url.values())
        extra = (
            max(process.fds - before[url].fds for url, process in by_url.items()) if before else 0
        )
        is_late = time.monotonic() > deadline
        if is_idle and (extra <= SPARE_FDS or is_late):
            return by_url
        if is_late:
            raise TimeoutError(f"not idle after {IDLE_SECONDS} s: {by_url}")
        await asyncio.sleep(0.5)


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=300, limits=limits, trust_env=False)


async def run_streams(fleet: Fleet, count: int, max_tokens: int) -> list[Answer]:
    """So many streams at once, spread over the gateways.

    They share some handbooks: of a single one all streams would go to the one engine that has it.
    """
    rules = "A rule that many share. " * 120

    async def stream(http: httpx.AsyncClient, index: int) -> Answer:
        gateway = fleet.gateways[index % len(fleet.gateways)]
        handbook = f"Handbook {index % _HANDBOOKS}. {rules}"
        options = {"stream": True, "max_tokens": max_tokens}
        body = body_of(gateway.model, handbook, f"stream {index}", **options)
        return await ask(http, body, gateway.url + MESSAGES, API_HEADERS)

    async with client() as http:
        return await asyncio.gather(*(stream(http, index) for index in range(count)))


def most_at_once(answers: Sequence[Answer]) -> int:
    """How many had begun to answer, and not ended, at the same time."""
    begun = [
        (answer.begun + answer.first_seconds, 1)
        for answer in answers
        if answer.first_seconds is not None
    ]
    ended = [
        (answer.begun + answer.seconds, -1)
        for answer in answers
        if answer.first_seconds is not None
    ]
    return max(accumulate(change for _, change in sorted(begun + ended)), default=0)


def disorder(names: list[str], text: str, max_tokens: int) -> str:
    """What is wrong with a stream of the synthetic engine, whose words count up."""
    ends = [name for name in names if name not in ("ping", "content_block_delta")]
    order = ["message_start", "content_block_start", "content_block_stop"]
    if ends != [*order, "message_delta", "message_stop"]:
        return f"events {ends}"
    expected_text = " ".join(["synthetic", *(str(index) for index in range(max_tokens - 1))])
    return "" if text == expected_text else f"text {text[:80]!r}… of {len(text)} characters"


@dataclass
class Soak:
    """What came of a long mixture: answers by kind and status, and readings over time."""

    turns: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    history: dict[str, list[Reading]] = field(default_factory=dict)


async def run_soak(fleet: Fleet, seconds: float, clients: int, pause: float, seed: int = 1) -> Soak:
    """Hits, misses, aborts and errors, by so many clients at once."""
    soak = Soak()
    until = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until:
            for url, process in (await readings(fleet)).items():
                soak.history.setdefault(url, []).append(process)
            await asyncio.sleep(pause)

    async with client() as http:
        await asyncio.gather(
            watch(), *(_mix(http, fleet, soak, until, f"{seed}-{n}") for n in range(clients))
        )
    return soak


async def _mix(http: httpx.AsyncClient, fleet: Fleet, soak: Soak, until: float, seed: str) -> None:
    rng = random.Random(seed)
    index = 0
    while time.monotonic() < until:
        index += 1
        gateway = rng.choice(fleet.gateways)
        url = gateway.url + MESSAGES
        kind = rng.choices(("hit", "miss", "abort", "error"), (50, 25, 15, 10))[0]
        shared = f"Handbook {rng.randrange(20)}. " if kind != "miss" else f"New {seed} {index}. "
        question = f"question {seed} {index}"
        body = body_of(gateway.model, shared + "Another rule. " * 150, question, max_tokens=32)
        try:
            if kind == "abort":
                body |= {"stream": True, "max_tokens": 200}
                async with http.stream("POST", url, json=body, headers=API_HEADERS) as reply:
                    async for _ in reply.aiter_bytes():
                        if rng.random() < 0.2:
                            break
                status = reply.status_code
            else:
                body |= {"temperature": 7} if kind == "error" else {}
                reply = await http.post(url, json=body, headers=API_HEADERS)
                status = reply.status_code
        except httpx.TransportError as error:
            soak.unexpected.append(f"{kind}: {error!r}")
            continue
        soak.turns[f"{kind} {status}"] += 1
        if status not in ({400} if kind == "error" else {200, 529}):
            soak.unexpected.append(f"{kind}: {status} {reply.text[:200]}")


def slope_an_hour(history: Sequence[Reading], name: str) -> float:
    """By least squares, of the second half: in the first, caches and pools fill."""
    half = history[len(history) // 2 :]
    figures = [float(getattr(point, name)) for point in half]
    return linear_regression([point.at for point in half], figures).slope * 3600


def test_all_streams_are_whole_and_nothing_grows(tmp_path: Path) -> None:
    """The same streams twice, of which the second time opens no more descriptors.

    Gateways keep idle connections to engines for 30 s, engines for 75 s: nobody waits for that.
    """
    streams, max_tokens, rounds, minutes = number((60, 40, 2, 5 / 60), (500, 100, 4, 20.0))
    settings = {**ENGINE, "ENGINE_SYNTHETIC_DECODE_MS": number("20", "50")}
    with running_fleet(tmp_path, 3, 2, settings, GATEWAY) as fleet:
        asyncio.run(run_streams(fleet, streams, max_tokens))
        before = asyncio.run(idle_readings(fleet))
        for _ in range(1, rounds):
            answers = asyncio.run(run_streams(fleet, streams, max_tokens))
            faults = (
                answer.error or disorder(answer.events, answer.text, max_tokens)
                for answer in answers
            )
            wrong = list(filter(None, faults))
            assert not wrong, wrong[:3]
            assert all(answer.first_seconds is not None for answer in answers)
            assert most_at_once(answers) > streams / 2
        again = asyncio.run(idle_readings(fleet, before))
        seconds = minutes * 60
        soak = asyncio.run(run_soak(fleet, seconds, number(8, 16), max(seconds / 120, 1)))
        after = asyncio.run(idle_readings(fleet, before))
    told("mixture", minutes=minutes, **soak.turns)
    assert not soak.unexpected, soak.unexpected[:3]
    assert {name.split()[0] for name in soak.turns} == {"hit", "miss", "abort", "error"}
    for url, end in after.items():
        assert end.fds - before[url].fds <= SPARE_FDS, url
        if number(False, True):
            history = soak.history[url]
            memory = slope_an_hour(history, "rss") / MIB
            fds = slope_an_hour(history, "fds")
            told(url, added_mib=(again[url].rss - before[url].rss) / MIB, mib_an_hour=memory)
            assert again[url].rss - before[url].rss <= MAX_ADDED_MIB * MIB, url
            assert memory <= MAX_MIB_AN_HOUR and fds <= MAX_FDS_AN_HOUR, url
