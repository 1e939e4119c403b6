"""Can one workspace tell what another has cached?

Real gateway, native engine, the demo model; three workspaces whose keys the command line made. What
a stranger sees of a prefix that another workspace has warmed is compared with the answer to a cold
prompt, whole.
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from scripts.bench.report import machine_line
from scripts.setup.options import parse
from scripts.stack import running_stack
from tests.isolation import probes


def main() -> int:
    options = parse(__doc__, probes=1000, seed=0)
    # All that the probes write fits into the lease budget: a full one shows in every answer.
    settings = {**probes.ENGINE, "ENGINE_NUM_BLOCKS": "65536"}
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        data = Path(work)
        running = stack.enter_context(running_stack(data, engine_settings=settings))
        owner, stranger, reference = (
            stack.enter_context(probes.client_of(running.gateway, probes.new_key(data, name)[1]))
            for name in ("owner", "stranger", "reference")
        )
        print(f"{machine_line()}; native engine on one thread, demo model\n", flush=True)
        exact = probes.probe_exactly(owner, stranger, reference, options.probes, seed=options.seed)
    hints = exact.hints or []
    print(
        f"{exact.probes} probes of another workspace's warm prefix: {exact.stranger_reads} read,"
        f" {len(hints)} answers differ from a cold one; the owner's own: {exact.owner_reads} read",
        *hints[:5],
        sep="\n  ",
    )
    is_good = (exact.stranger_reads, len(hints), exact.owner_reads) == (0, 0, exact.probes)
    print("nothing leaks" if is_good else "something leaks")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
