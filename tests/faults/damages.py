"""Random damage to the data directory of a killed gateway, then the next start: is any turn lost
without a word?

    python -m tests.faults.damages --count 200 [--processes 0.2]

Trials and words are those of `tests/gateway/journal/damages.py`. Ends with 1 where a turn is
unnamed or collateral, or anything else was wrong.
"""

import sys
from collections import Counter

from scripts.bench.report import table
from scripts.setup.options import parse
from tests.gateway.journal.damaged_starts import Outcome
from tests.gateway.journal.damages import run

FATES = ("intact", "named", "unnamed", "collateral")


def report(outcomes: list[Outcome]) -> None:
    kinds = Counter(kind for outcome in outcomes for kind in outcome.damages)
    rows = []
    for kind, trials in sorted(kinds.items()):
        own = [outcome for outcome in outcomes if kind in outcome.damages]
        sums = [sum(len(getattr(outcome, fate)) for outcome in own) for fate in FATES]
        rows.append([kind, str(trials), *map(str, sums)])
    print(table(("damage", "trials", *FATES), rows))


def main() -> int:
    options = parse(
        __doc__,
        count=200,
        seed=(0, "of the first trial"),
        processes=(0.2, "share of real gateways"),
    )
    outcomes = run(options.count, options.seed, options.processes)
    report(outcomes)
    for outcome in outcomes:
        if outcome.unnamed or outcome.collateral or outcome.wrong:
            print(f"seed {outcome.seed} (process: {outcome.is_process}): {outcome.damages}")
            print(f"  unnamed {outcome.unnamed}, collateral {outcome.collateral}, {outcome.wrong}")
            print(f"  said: {outcome.said[:500]}")
    silent, beside, wrong = (
        sum(len(getattr(outcome, name)) for outcome in outcomes)
        for name in ("unnamed", "collateral", "wrong")
    )
    started = sum(outcome.has_started for outcome in outcomes)
    processes = sum(outcome.is_process for outcome in outcomes)
    print(
        f"{len(outcomes)} trials, {processes} of them with a real gateway: {started} started,"
        f" {len(outcomes) - started} said in one line why not; {silent} turns wrong without a word,"
        f" {beside} lost that no damage had touched, {wrong} other wrongs"
    )
    return 1 if silent or beside or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
