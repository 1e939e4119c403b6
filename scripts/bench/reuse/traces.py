"""Traffic to replay: two public traces, and kinds made up by a rule.

A block's id stands for its content and for all content before it, so equal ids are equal prefixes.
"""

import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from engine.backends.synthetic_renderer import BYTES_PER_TOKEN
from engine.cache.worth import ENDS, AnswerEnd
from scripts.simulate.workload import Pieces
from scripts.simulate.workload import conversations as made_up

MIN_TOKENS = 1024
"""The fewest tokens of an entry by default. Shorter prompts get none, and are counted apart."""
CONVERSATIONS = "conversation_trace.jsonl"
# fmt: off
SESSIONS = (
    67, 75, 116, 134, 143, 172, 211, 235, 312, 360, 484, 501,
    517, 521, 539, 545, 553, 584, 595, 601, 646, 652, 710, 724,
)
# fmt: on
"""The agents' sessions that are replayed, by their number in `agentic/trace_NNNN.json`."""
COPIES = 3
SPAN_SECONDS = 7200.0
TALK_BLOCK = 16
IN_FLIGHT = 24
STARVED_BLOCK = 16
NUM_CHATS = 14
CHAT_SECONDS = 15.0
CHAT_TURNS = 8
FIRST_BLOCKS = 81
TURN_BLOCKS = 25
NUM_SHORT = 40
NUM_SYSTEMS = 5
SYSTEM_BLOCKS = 15
SHORT_TOKENS = 312
FLOODED_BLOCK = 16
FLOODED_MEMORY = 2048
FLOOD_BLOCKS = 64
FLOODS = (0.25, 0.5, 0.75, 1.0, 2.0)
"""How much comes between two turns of a conversation, as parts of the memory."""
FLOODED_TURNS = 12
FLOODED_FIRST_BLOCKS = 256
FLOODED_TURN_BLOCKS = 4
FLOODED_PAUSE_SECONDS = 600.0
"""The time between two conversations. No lease of 5 minutes outlives it."""


class TraceMissing(Exception):
    """A file of a public trace is not in the folder. The message names it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt that arrives."""

    # The arrival, in seconds from the trace's beginning.
    at: float
    # The ids of its blocks. The last one may be filled in part.
    blocks: "array[int]"
    tokens: int
    # How many of its first blocks stood in an earlier prompt.
    known: int
    # The group in which its reads are counted as well.
    group: str
    end: AnswerEnd = "other"


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, in blocks of `block_size` tokens."""

    block_size: int
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before its blocks have ids."""

    at: float
    # The names by which its blocks are told apart.
    names: Sequence[object]
    tokens: int
    # None: the prompt's length decides the group.
    group: str | None = None
    end: AnswerEnd = "other"


def new_trace(block_size: int, prompts: Iterable[Prompt]) -> Trace:
    """Number the blocks of prompts in order of arrival.

    A partly filled block without a name is in no other prompt.
    """
    ids: dict[object, int] = {}
    requests: list[Request] = []
    for prompt in prompts:
        blocks = array("I")
        num_known = 0
        for place, name in enumerate(prompt.names):
            if name in ids and num_known == place:
                num_known += 1
            blocks.append(ids.setdefault(name, len(ids)))
        if len(blocks) * block_size < prompt.tokens:
            blocks.append(ids.setdefault(object(), len(ids)))
        group = prompt.group
        if group is None:
            group = "short" if prompt.tokens < MIN_TOKENS else "long"
        requests.append(Request(prompt.at, blocks, prompt.tokens, num_known, group, prompt.end))
    return Trace(block_size, requests)


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]


class _Call(msgspec.Struct):
    t: float
    tokens: int = msgspec.field(name="in")
    hash_ids: list[int] = []
    stop: str | None = None  # how its answer ended


class _Session(msgspec.Struct):
    requests: list[_Call]


def conversations(folder: Path) -> Trace:
    """Mooncake's trace of conversations (FAST '25). Raises TraceMissing."""
    decoder = msgspec.json.Decoder(_Line)
    lines = map(decoder.decode, _read(folder / CONVERSATIONS).splitlines())
    return new_trace(
        512, (Prompt(line.timestamp / 1000, line.hash_ids, line.input_length) for line in lines)
    )


def own(file: Path, block_size: int) -> Trace:
    """A trace of your own traffic, as `python -m gateway trace` prints it. Raises TraceMissing."""
    decoder = msgspec.json.Decoder(_Line)
    lines = [decoder.decode(line) for line in _read(file).splitlines() if line.strip()]
    prompts = sorted(lines, key=lambda line: line.timestamp)
    return new_trace(
        block_size,
        (Prompt(line.timestamp / 1000, line.hash_ids, line.input_length) for line in prompts),
    )


def agents(folder: Path, seed: int = 1) -> Trace:
    """24 sessions of coding agents, COPIES times, begun at random within SPAN_SECONDS.

    Copies share nothing. Raises TraceMissing.
    """
    draw = random.Random(seed)
    decoder = msgspec.json.Decoder(_Session)
    files = [folder / "agentic" / f"trace_{number:04}.json" for number in SESSIONS]
    sessions = [decoder.decode(_read(file)) for file in files]
    prompts: list[Prompt] = []
    for copy in range(COPIES):
        for number, session in zip(SESSIONS, sessions, strict=True):
            begin = draw.uniform(0, SPAN_SECONDS)
            for call in session.requests:
                if call.hash_ids:
                    names = [(copy, number, block) for block in call.hash_ids]
                    end: AnswerEnd = next((end for end in ENDS if end == call.stop), "other")
                    prompts.append(Prompt(begin + call.t, names, call.tokens, end=end))
    return new_trace(64, sorted(prompts, key=lambda prompt: prompt.at))


def strangers(seed: int = 1) -> Trace:
    """Short prompts under some forty system prompts, among long chats that never come back."""
    draw = random.Random(seed)

    def prompts() -> Iterator[Prompt]:
        for number in range(6000):
            names: list[object]
            if draw.random() < 0.3:
                names = [("chat", number, place) for place in range(64)]
            else:
                system = min(int(draw.expovariate(1 / 6)), 40)
                names = [*(("system", system, place) for place in range(4)), ("question", number)]
            yield Prompt(float(number), names, 64 * len(names))

    return new_trace(64, prompts())


def talks(shape: str, seed: int = 1) -> Trace:
    """The conversations that `scripts.simulate` makes up. IN_FLIGHT of them run at once, in
    turn."""
    pieces = Pieces(TALK_BLOCK * BYTES_PER_TOKEN)

    def prompts() -> Iterator[Prompt]:
        waiting = deque(made_up(shape, seed))
        running = deque[tuple[list[int], deque[str]]]()
        at = 0.0
        while waiting or running:
            while waiting and len(running) < IN_FLIGHT:
                system, questions = waiting.popleft()
                chain = list[int]()
                pieces.append(chain, system)
                running.append((chain, deque(questions)))
            chain, behind = running.popleft()
            pieces.append(chain, behind.popleft())
            at += 1.0
            yield Prompt(at, list(chain), TALK_BLOCK * len(chain))
            if behind:
                running.append((chain, behind))

    return new_trace(TALK_BLOCK, prompts())


def starved() -> Trace:
    """Short prompts under few system prompts, twice; then chats that never come back; then the
    same short prompts, twice again."""

    def prompts() -> Iterator[Prompt]:
        at = 0.0
        for group in ("1 first", "2 again", "chats", "3 after the chats", "4 again"):
            if group == "chats":
                for number in range(NUM_CHATS):
                    for turn in range(CHAT_TURNS):
                        num_blocks = FIRST_BLOCKS + turn * TURN_BLOCKS
                        names = [("chat", number, place) for place in range(num_blocks)]
                        at += CHAT_SECONDS / CHAT_TURNS
                        yield Prompt(at, names, STARVED_BLOCK * num_blocks, group=group)
                continue
            for number in range(NUM_SHORT):
                system = number % NUM_SYSTEMS
                head = [("system", system, place) for place in range(SYSTEM_BLOCKS)]
                num_behind = SHORT_TOKENS // STARVED_BLOCK - SYSTEM_BLOCKS
                behind = [("question", number, place) for place in range(num_behind)]
                at += 1.0
                yield Prompt(at, [*head, *behind], SHORT_TOKENS, group=group)

    return new_trace(STARVED_BLOCK, prompts())


def flooded() -> Trace:
    """A conversation for each of FLOODS, one behind the other, in one workspace.

    Between two turns come prompts that nobody sends again, as large together as the flood says. A
    conversation's first turn, and the floods, are in the group of chats.
    """

    def prompts() -> Iterator[Prompt]:
        at = 0.0
        for part in FLOODS:
            at += FLOODED_PAUSE_SECONDS
            for turn in range(FLOODED_TURNS):
                num_blocks = FLOODED_FIRST_BLOCKS + turn * FLOODED_TURN_BLOCKS
                names: list[object] = [("conversation", part, place) for place in range(num_blocks)]
                group = f"flood of {part:.2f}" if turn else "chats"
                at += 1.0
                yield Prompt(at, names, FLOODED_BLOCK * num_blocks, group=group)
                for number in range(int(part * FLOODED_MEMORY) // FLOOD_BLOCKS):
                    flood = [("flood", part, turn, number, place) for place in range(FLOOD_BLOCKS)]
                    at += 0.1
                    yield Prompt(at, flood, FLOODED_BLOCK * FLOOD_BLOCKS, group="chats")

    return new_trace(FLOODED_BLOCK, prompts())


SIZES = {
    "starved": (2048,),
    "flooded": (FLOODED_MEMORY,),
    "strangers": (256, 1024, 2048),
    "tenants": (4000, 8000),
    "parting": (1100, 2200),
    "sessions": (7700, 15_400),
    "conversations": (2000, 10_000, 30_000),
    "agents": (5000, 10_000, 20_000, 40_000),
}
"""What can be replayed, and the sizes of memory to do so with, in blocks."""


@cache
def load(name: str, folder: Path, block_size: int = 0) -> Trace:
    """The trace of this name. Raises TraceMissing if it is public and not in the folder. With a
    `block_size` the folder is the file of a trace in Mooncake's format, in blocks of so many
    tokens."""
    if block_size:
        return own(folder, block_size)
    match name:
        case "conversations":
            return conversations(folder)
        case "agents":
            return agents(folder)
        case "tenants" | "parting" | "sessions":
            return talks(name)
        case "strangers":
            return strangers()
        case "starved":
            return starved()
        case "flooded":
            return flooded()
    raise TraceMissing(f"{name}: no such trace")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise TraceMissing(
            f"{file} is not there: scripts/bench/README.md says where it is"
        ) from None
