"""Random sequences against the reference model of the contract: equal counters, no tolerance.

scripts/fuzz_accounting [--sequences 2000] [--seed 1] [--engine native|hybrid|synthetic|vllm]
    [--through engine|gateway]

Sequence i has seed + i: `--seed N --sequences 1` plays one again. Ends with status 1 where there
was a difference.
"""

import argparse
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from tests.fuzz.houses import by_gateway, by_protocol
from tests.fuzz.play import Player
from tests.fuzz.servers import Server

PROGRESS_SECONDS = 20


def main() -> int:
    options = _parser().parse_args()
    if options.through == "gateway" and options.engine != "native":
        print("the gateway is played with the native engine only", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as data:
        house: AbstractContextManager[Server] = (
            by_gateway(Path(data))
            if options.through == "gateway"
            else by_protocol(Path(data), options.engine)
        )
        with house as server:
            player = Player(server)
            seconds = play_all(player, options.seed, options.sequences)
    print(
        f"seed {options.seed}, engine {options.engine}, through the {options.through}:"
        f" {seconds:.0f} s"
    )
    for what, number in sorted(player.tally.items()):
        print(f"  {what:40}{number:>12,}")
    print(f"{len(player.differences)} differences")
    return 1 if player.differences else 0


def play_all(player: Player, seed: int, sequences: int) -> float:
    """Print progress and each difference as it is found; return how many seconds it took."""
    began = printed = time.monotonic()
    for number in range(sequences):
        known = len(player.differences)
        player.play(seed + number)
        for line in player.differences[known:]:
            print(f"DIFFERENCE {line}", flush=True)
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            print(
                f"{number + 1} of {sequences} sequences, {player.tally['turns']:,} turns,"
                f" {len(player.differences)} differences, {printed - began:.0f} s",
                flush=True,
            )
    return time.monotonic() - began


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/fuzz_accounting", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence")
    parser.add_argument(
        "--engine", choices=["native", "hybrid", "synthetic", "vllm"], default="native"
    )
    parser.add_argument("--through", choices=["engine", "gateway"], default="engine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
