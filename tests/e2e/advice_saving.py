"""Is what the advisor predicts what its markers save on an engine?

Each traffic is sent to a gateway and a real engine on a manual clock as its client marks it. The
advisor looks at the ledger. The same traffic is sent again, from another workspace, with the
advised markers. The bills of both, as the engine counted them, make the measured saving. Costs are
in input tokens: writes are 1.25 and 2, a read is 0.1.

    python -m tests.e2e.advice_saving --backend synthetic
    python -m tests.e2e.advice_saving --backend native
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.admin.advice import Gathering
from gateway.admin.structs.advice import StreamAdvice
from gateway.advice.observation import Observation
from gateway.advice.stream import advise_stream
from gateway.advice.words import BEFORE_ANSWER, LAST_BLOCK
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import observed
from gateway.prices.files import load_prices
from scripts.setup.options import new_parser
from tests.fuzz.houses import running_machines, serving
from tests.fuzz.servers import Machines
from tests.gateway.advice.shapes import Author

MIN_TOKENS = 64
WITHIN = 0.05
_ALL_MS = 253_402_300_799_000
_WAIT_SECONDS = 120.0
_HEADERS = {"anthropic-version": "2023-06-01"}
_MODELS = """default = 'm'
[[models]]
id = 'm'
engine_model = '{0}'
min_cache_tokens = {1}
"""
Body = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request, so many seconds after the one before."""

    seconds: float
    body: Body


def talks(author: Author) -> list[Asked]:
    """Growing conversations with one system prompt, some with a long break."""
    system, asked = author.text(8), []
    for _ in range(3):
        said: list[Body] = []
        for _ in range(6):
            said = [*said, _says("user", author.line())]
            gap = 400.0 if author.chance.random() < 0.15 else 20.0
            asked.append(Asked(gap, _body(system, said)))
            said = [*said, _says("assistant", author.text(2))]
    return asked


def every_minute(author: Author) -> list[Asked]:
    system = author.text(10)
    return [Asked(60.0, _body(system, [_says("user", author.line())])) for _ in range(16)]


def every_ten_minutes(author: Author) -> list[Asked]:
    system = author.text(10)
    return [Asked(600.0, _body(system, [_says("user", author.line())])) for _ in range(12)]


def with_tools(author: Author) -> list[Asked]:
    """The tools stay, the system prompt is new each time."""
    tools = [
        {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
        for tool in author.tools(6)
    ]
    return [
        Asked(45.0, _body(author.text(4), [_says("user", author.line())]) | {"tools": tools})
        for _ in range(12)
    ]


def examples_first(author: Author) -> list[Asked]:
    shots = [_text(author.text(3)) for _ in range(3)]
    return [
        Asked(30.0, _body(None, [{"role": "user", "content": [*shots, _text(author.line())]}]))
        for _ in range(12)
    ]


def never_read(author: Author) -> list[Asked]:
    """Each prompt is marked for an hour and never comes again."""
    bodies = [_body(author.text(10), [_says("user", author.line())]) for _ in range(10)]
    return [Asked(20.0, _marked(body, [("system", "1h")])) for body in bodies]


def wrong_ttl(author: Author) -> list[Asked]:
    """Marked for five minutes, and sent every twelve."""
    system = author.text(10)
    return [
        Asked(720.0, _marked(_body(system, [_says("user", author.line())]), [("system", "5m")]))
        for _ in range(10)
    ]


TRAFFIC: dict[str, Callable[[Author], list[Asked]]] = {
    made.__name__: made
    for made in (
        talks,
        every_minute,
        every_ten_minutes,
        with_tools,
        examples_first,
        never_read,
        wrong_ttl,
    )
}


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--backend", choices=("synthetic", "native"), default="synthetic")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--traffic", choices=[*TRAFFIC], nargs="*", default=[*TRAFFIC])
    options = parser.parse_args()
    seeds = range(options.seeds)
    names = [f"{name}-{seed}-{run}" for name in options.traffic for seed in seeds for run in "ab"]
    print(f"{options.backend} engine, manual clock; costs in input tokens")
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with running_machines(path, options.backend) as both:
            machines = Machines(both.engines[:1], both.slots)
            models = _MODELS.format(machines.engines[0].description.model, MIN_TOKENS)
            with serving(path, machines, models, names) as (url, keys):
                house = House(machines, url, dict(zip(names, keys, strict=True)), path / "data")
                for name in options.traffic:
                    for seed in seeds:
                        wrong += not compare(house, name, seed)
    print(f"{wrong} of {len(names) // 2} differ by more than {WITHIN:.0%}")
    return 1 if wrong else 0


@dataclass
class House:
    machines: Machines
    url: str
    keys: dict[str, str]
    data: Path


def compare(house: House, name: str, seed: int) -> bool:
    """Send a traffic twice, and print the predicted and the measured saving."""
    asked = TRAFFIC[name](Author(random.Random(f"{name} {seed}")))
    before = sent(house, f"{name}-{seed}-a", asked)
    advice = advise_stream(before, MIN_TOKENS)
    ways = [(marker.place, marker.ttl) for marker in advice.markers]
    is_left = advice.verdict == "leave"
    again = asked if is_left else [Asked(each.seconds, _marked(each.body, ways)) for each in asked]
    after = sent(house, f"{name}-{seed}-b", again)
    measured = _bill(before) - _bill(after)
    predicted = advice.saves.multiples
    share = abs(predicted - measured) / max(abs(measured), 1.0)
    print(
        f"{name:18} seed {seed}: {advice.verdict:6} {_shown(advice):44}"
        f" predicted {predicted:10,.1f} measured {measured:10,.1f} apart {share:.1%}"
    )
    return share <= WITHIN


def sent(house: House, workspace: str, asked: Sequence[Asked]) -> list[Observation]:
    """The turns as the ledger has them, at the times of the manual clock."""
    headers = {**_HEADERS, "x-api-key": house.keys[workspace]}
    now, times = 0.0, []
    with httpx.Client(base_url=house.url, headers=headers, timeout=120, trust_env=False) as client:
        for each in asked:
            house.machines.advance(each.seconds)
            now += each.seconds
            times.append(int(now * 1000))
            reply = client.post("/v1/messages", json={"model": "m", "max_tokens": 1, **each.body})
            reply.raise_for_status()
    rows = _rows(house.data, workspace, len(asked))
    gathering = Gathering(load_prices())
    gathering.take([_At(row, at) for row, at in zip(rows, times, strict=True)][::-1])
    ((_, turns),) = gathering.largest()
    # Machines of the next traffic hold nothing of this one.
    house.machines.advance(7200.0)
    return turns


class _At:
    """A row of the ledger at another time."""

    def __init__(self, row: Any, at_ms: int) -> None:
        self._row, self.opened_ms = row, at_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)


def _rows(data: Path, workspace: str, count: int) -> list[Any]:
    """The workspace's rows, oldest first; the gateway fills the ledger a moment later."""
    of = Range(since_ms=0, until_ms=_ALL_MS, workspace=workspace)

    async def read(ledger: Ledger) -> list[Any]:
        return [row async for rows in observed(ledger, of, None, 10_000) for row in rows]

    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        found = asyncio.run(with_ledger(f"sqlite+aiosqlite:///{data}/ledger.db", read))
        if len(found) == count:
            return found[::-1]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} of {count} turns are in the ledger")
        time.sleep(0.2)


def _bill(turns: Sequence[Observation]) -> float:
    return sum(
        usage.input_tokens
        + 1.25 * usage.cache_write_5m_tokens
        + 2 * usage.cache_write_1h_tokens
        + 0.1 * usage.cache_read_tokens
        for usage in (turn.served.usage for turn in turns)
    )


def _shown(advice: StreamAdvice) -> str:
    return ", ".join(f"{marker.place} {marker.ttl}" for marker in advice.markers)[:44]


def _marked(body: Body, ways: Sequence[tuple[str, str]]) -> Body:
    """The body with markers at these places and no others."""
    made: Body = _plain(msgspec.json.decode(msgspec.json.encode(body)))
    holders: dict[int, tuple[Body, str]] = {}
    for place, ttl in ways:
        holder = _holder(made, place)
        if holder is not None:
            holders.setdefault(id(holder), (holder, ttl))
    for holder, ttl in holders.values():
        holder["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return made


def _holder(body: Body, place: str) -> Body | None:
    messages = [block for message in body["messages"] for block in message["content"]]
    if place == LAST_BLOCK:
        return messages[-1]
    if place == BEFORE_ANSWER:
        roles = [message["role"] for message in body["messages"]]
        answers = [n for n, role in enumerate(roles) if role == "assistant"]
        return body["messages"][answers[-1] - 1]["content"][-1] if answers else None
    section, _, index = place.partition(".")
    blocks = messages if section == "messages" else body.get(section, [])
    number = int(index) if index else len(blocks) - 1
    return blocks[number] if 0 <= number < len(blocks) else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name != "cache_control"}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _body(system: str | None, messages: list[Body]) -> Body:
    return ({"system": [_text(system)]} if system else {}) | {"messages": messages}


def _says(role: str, text: str) -> Body:
    return {"role": role, "content": [_text(text)]}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


if __name__ == "__main__":
    sys.exit(main())
