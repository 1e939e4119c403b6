"""Does the advisor name every planted fault at its block, and raise no false alarm?

Shapes are prompts over hours or days, and bodies of all dialects as they are pasted.

python -m tests.gateway.advice.simulated --seeds 50
"""

import random
import sys
from collections import Counter

from gateway.advice import pasted
from gateway.advice.faults import Fault, find_faults
from gateway.advice.observation import Observation
from scripts.setup.options import new_parser
from tests.gateway.advice.bodies import Bodies
from tests.gateway.advice.bodies_faulty import FAULTY_BODIES
from tests.gateway.advice.bodies_sound import SOUND_BODIES
from tests.gateway.advice.faulty import FAULTY, Expected
from tests.gateway.advice.shapes import Author, observed
from tests.gateway.advice.sound import SOUND


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    seeds = range(parser.parse_args().seeds)
    wrong = 0
    for name in (*FAULTY, *FAULTY_BODIES):
        missed = [seed for seed in seeds if not is_named(*faults_of(name, seed))]
        wrong += len(missed)
        print(f"planted {name:32} named at its block: {len(seeds) - len(missed)} of {len(seeds)}")
        for seed in missed[:3]:
            found, expected = faults_of(name, seed)
            print(f"   seed {seed}: wanted {expected}, found {shown(found)}")
    for name in (*SOUND, *SOUND_BODIES):
        alarms: Counter[str] = Counter()
        for seed in seeds:
            alarms.update(f"seed {seed}: {each}" for each in shown(sound_faults(name, seed)))
        wrong += len(alarms)
        print(f"sound   {name:32} false alarms: {len(alarms)} in {len(seeds)}")
        for each in list(alarms)[:3]:
            print(f"   {each}")
    shapes = [*FAULTY, *FAULTY_BODIES, *SOUND, *SOUND_BODIES]
    print(f"{wrong} wrong of {len(seeds) * len(shapes)}")
    return 1 if wrong else 0


def faults_of(name: str, seed: int) -> tuple[list[Fault], Expected]:
    """What the advisor finds in a shape with a planted fault, and what was planted."""
    author = Author(random.Random(f"{name} {seed}"))
    if name in FAULTY_BODIES:
        bodies, expected = FAULTY_BODIES[name](author)
        return find_faults(pasted_turns(bodies)), expected
    sent, expected = FAULTY[name](author)
    return find_faults(observed(sent)), expected


def sound_faults(name: str, seed: int) -> list[Fault]:
    author = Author(random.Random(f"{name} {seed}"))
    if name in SOUND_BODIES:
        return find_faults(pasted_turns(SOUND_BODIES[name](author)))
    return find_faults(observed(SOUND[name](author)))


def pasted_turns(bodies: Bodies) -> list[Observation]:
    """The turns of pasted requests, a second apart."""
    return [
        pasted.observation_of(pasted.read(body), number, number * 1000, None)
        for number, body in enumerate(bodies)
    ]


def is_named(found: list[Fault], expected: Expected) -> bool:
    """Whether the planted fault is the one that is found, at its block, and no other one is."""
    section = expected.path.partition(".")[0]
    return bool(found) and all(
        each.kind in expected.kinds
        and (each.path == expected.path or expected.path == section == each.section)
        for each in found
    )


def shown(found: list[Fault]) -> list[str]:
    return [
        f"{each.kind} at {each.path} ({each.turns} turns, {each.tokens} tokens)" for each in found
    ]


if __name__ == "__main__":
    sys.exit(main())
