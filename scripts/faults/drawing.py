"""What mixtures of requests draw: sizes, schemas, texts, and when a client leaves."""

import asyncio
import random
from typing import Any

from scripts.faults.attacks import Neighbour, post
from scripts.faults.houses import WORDS, text

Json = dict[str, Any]

_PATIENCE_SECONDS = 60.0


def size(rng: random.Random, most: int) -> int:
    """Between 1 and a little more than `most`: each order of magnitude is as likely."""
    drawn: float = most ** rng.uniform(0, 1.02)
    return max(1, min(round(drawn), most + rng.choice((0, 0, 0, 1))))


def schema(rng: random.Random, num_properties: int, depth: int) -> Json:
    kinds = ({"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "boolean"})
    names = [f"{rng.choice(WORDS)}{number}" for number in range(num_properties)]
    made: Json = {
        "type": "object",
        "properties": {name: rng.choice(kinds) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": rng.random() < 0.5,
    }
    for _ in range(depth // 2):
        made = {"type": "object", "properties": {rng.choice(WORDS): made}}
    return made


def drawn_schema(who: Neighbour, rng: random.Random) -> Json:
    most = who.bounds.max_schema_properties if rng.random() < 0.3 else 40
    return schema(rng, size(rng, most), size(rng, who.bounds.max_schema_depth))


def words_of(who: Neighbour, rng: random.Random) -> str:
    return text(rng, size(rng, who.context // 3))


async def leaving(who: Neighbour, rng: random.Random, path: str, body: Json | bytes) -> int:
    """Send; a third of the clients leave at some moment."""
    seconds = rng.uniform(0, 4) if rng.random() < 0.33 else _PATIENCE_SECONDS
    try:
        async with asyncio.timeout(seconds):
            return await post(who, path, body)
    except TimeoutError:
        return 0
