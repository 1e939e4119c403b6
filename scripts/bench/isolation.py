"""Can one workspace tell what another has cached? Exact probes, then times to the first token.

Real gateway, native engine, the demo model; three workspaces whose keys the command line made. The
exact part compares whole answers. The timing part is the audit of Gu et al. (ICML 2025): two-sample
Kolmogorov-Smirnov tests on the times to the first token of a stranger's probes, of the owner's own
and of cold prompts, in random order, each prompt of made-up words that no other has. Leaking means
a p of at most 0.01 for stranger against cold; the test is worth something where the owner's own
probes give less than 1e-8.
"""

import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx
from scipy.stats import ks_2samp  # type: ignore[import-untyped]

from scripts.bench.report import machine_line
from scripts.setup.options import parse
from scripts.stack import running_stack
from tests.isolation import probes

MAX_LEAK = 0.01
MAX_CONTROL = 1e-8
BATCH = 25
STREAM = probes.Shape("messages", stream=True, marked=True)


def main() -> int:
    options = parse(
        __doc__,
        probes=(1000, "exact probes; 0 leaves them out"),
        timed=(250, "timed probes of each kind"),
        words=(150, "of a timed prompt's prefix"),
        runs=(3, "of the timing part"),
        seed=0,
    )
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
        good = True
        if options.probes:
            exact = probes.probe_exactly(
                owner, stranger, reference, options.probes, seed=options.seed
            )
            hints = exact.hints or []
            print(
                f"{exact.probes} probes of another workspace's warm prefix: {exact.stranger_reads}"
                f" read, {len(hints)} answers differ from a cold one; the owner's own:"
                f" {exact.owner_reads} read",
                *(f"\n  {hint}" for hint in hints[:5]),
                flush=True,
            )
            good = (exact.stranger_reads, len(hints), exact.owner_reads) == (0, 0, exact.probes)
        for run in range(options.runs):
            rng = random.Random(f"{options.seed} {run}")
            times = measure(owner, stranger, options.timed, options.words, rng)
            good &= report_times(run, times)
    print("\nnothing leaks" if good else "\nsomething leaks, or the control is too weak")
    return 0 if good else 1


def measure(
    owner: httpx.Client, stranger: httpx.Client, number: int, words: int, rng: random.Random
) -> dict[str, list[float]]:
    """Seconds to the first token, by kind. What is probed was warmed within the same batch."""
    times: dict[str, list[float]] = {"cold": [], "stranger": [], "owner": []}

    def timed(client: httpx.Client, prefix: str) -> float:
        body = probes.body_of(STREAM, prefix, probes.words(rng, 6))
        return probes.seconds_to_first_token(client, STREAM, body)

    for start in range(0, number, BATCH):
        warmed = [probes.words(rng, words) for _ in range(min(BATCH, number - start))]
        for prefix in warmed:
            timed(owner, prefix)
        asked = [("owner", owner, prefix) for prefix in warmed]
        asked += [("stranger", stranger, prefix) for prefix in warmed]
        asked += [("cold", stranger, probes.words(rng, words)) for _ in warmed]
        rng.shuffle(asked)
        for kind, client, prefix in asked:
            times[kind].append(timed(client, prefix))
    return times


def report_times(run: int, times: dict[str, list[float]]) -> bool:
    medians = (f"{kind} {statistics.median(found) * 1e3:.1f}" for kind, found in times.items())
    leak = float(ks_2samp(times["stranger"], times["cold"]).pvalue)
    control = float(ks_2samp(times["owner"], times["cold"]).pvalue)
    print(
        f"run {run + 1}: n = {len(times['cold'])} each; medians in ms: {', '.join(medians)};"
        f" p: stranger against cold {leak:.3f}, owner against cold {control:.1e}",
        flush=True,
    )
    return leak > MAX_LEAK and control < MAX_CONTROL


if __name__ == "__main__":
    sys.exit(main())
