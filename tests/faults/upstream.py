"""Whether scopes are kept apart by a server that is not ours, and whether a count is ever wrong.

    VLLM_PYTHON=.venv-vllm/bin/python python -m tests.faults.upstream [--probes 1000]
    python -m tests.faults.upstream --upstream http://127.0.0.1:8000

Starts an unmodified `vllm serve` (or takes the server that is named), and an engine before it. For
each probe one scope writes a prompt, and another asks for the same. Ends with 1 unless every row of
the table is as it should be.
"""

import argparse
import os
import sys
import time

from engine.protocol import InputUsage
from tests.conformance.engines import Engine, Settings, prompt, running_engine

SETTINGS: Settings = {
    "CLOCK": "manual",
    "MIN_CACHE_TOKENS": 32,
    "BLOCK_SIZE": 32,
    "NUM_BLOCKS": 4096,
    "VLLM_ARGS": '{"max_model_len": 8192}',
}
OWNER_EVERY = 10
"""Every so many probes the owner asks again: what a probe did not read is really there."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--upstream", default="", help="URL of a server that runs already")
    options = parser.parse_args()
    if options.upstream:
        os.environ["UPSTREAM_URL"] = options.upstream
    with running_engine("upstream", SETTINGS) as engine:
        return probe(engine, options.probes)


def probe(engine: Engine, probes: int) -> int:
    """Print what the probes read. 1 if anybody read of another scope, or an owner read nothing."""
    since = time.monotonic()
    print(f"server: {engine.description.upstream}")
    for promise in engine.description.guarantees:
        print(f"  {promise.name}: {'yes' if promise.is_kept else 'no'} ({promise.note})")
    foreign_reads = foreign_automatic = owners = owner_reads = leased = 0
    for number in range(probes):
        owner = engine.scope()
        request = prompt(engine.text(120))
        reports = engine.ask(request, owner, 0).started.breakpoints
        leased += sum(report.state == "leased" for report in reports)
        usage: InputUsage = engine.ask(request, engine.scope(), 0).usage
        foreign_reads += usage.cache_read_tokens > 0
        # The template's beginning is everybody's on servers that reuse single tokens.
        foreign_automatic += usage.automatic_tokens >= engine.description.block_size
        if number % OWNER_EVERY == 0:
            owners += 1
            owner_reads += engine.ask(request, owner, 0).usage.cache_read_tokens > 0
    stats = engine.stats()
    leased += stats.num_leases
    print(f"probes of another scope's prompt: {probes} in {time.monotonic() - since:.0f} s")
    print(f"  read something: {foreign_reads}")
    print(f"  reused something: {foreign_automatic}")
    print(f"owners that asked again: {owners}, read: {owner_reads}")
    print(f"called leased: {leased}")
    is_right = not (foreign_reads or foreign_automatic or leased) and owner_reads == owners
    print("as it should be" if is_right else "NOT as it should be")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
