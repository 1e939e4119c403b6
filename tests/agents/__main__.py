"""python -m tests.agents [names]: run the agents in AGENTS_FOLDER and print their table.

A name picks the recipes whose name has it, whatever the case. `scripts/long_tests agents` installs
the agents first. The status is 1 where a client was refused or did not come to its end.
"""

import os
import sys
from pathlib import Path

from tests.agents.recipes import recipes
from tests.agents.run import HEAD, Outcome, run_one


def main(names: list[str]) -> int:
    folder = Path(os.environ["AGENTS_FOLDER"]).resolve()
    wanted = [
        recipe
        for recipe in recipes()
        if not names or any(name.lower() in recipe.name.lower() for name in names)
    ]
    outcomes: list[Outcome] = []
    for recipe in wanted:
        outcome = run_one(recipe, folder)
        outcomes.append(outcome)
        print(outcome.line, file=sys.stderr, flush=True)
        print(f"    prompts of {list(outcome.lengths)} tokens", file=sys.stderr)
        for refusal in outcome.refusals:
            print(f"    {refusal.status} {refusal.path} {refusal.answer[:400]}", file=sys.stderr)
        if not outcome.has_ended_well:
            print(outcome.printed[-1500:], file=sys.stderr)
    print("\n".join([HEAD, *(outcome.line for outcome in outcomes)]))
    return 0 if all(outcome.is_good for outcome in outcomes if outcome.is_installed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
