"""Every benchmark from one place: installs what it needs, then runs it.

    python -m scripts.bench                    lists them
    python -m scripts.bench NAME [arguments]   `python -m scripts.bench NAME --help` for these

Each is a module as well (`python -m scripts.bench.NAME`), for an environment that has all it needs.
"""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from scripts.setup.install_needs import InstallError, install
from scripts.stack import ROOT, python


class Benchmark(NamedTuple):
    about: str
    needs: Sequence[str]


SYSTEM = ("gateway", "engine", "test", "bench")
BENCHMARKS = {
    "batches": Benchmark("batches of many prompts beside interactive turns", SYSTEM),
    "dashboard": Benchmark("how soon each page shows its numbers, and ten sessions",
                           ("gateway", "engine", "dashboard", "test", "bench")),
    "flood": Benchmark("what a flood leaves of a leased, a best-effort and an unmarked prefix",
                       ("engine", "test")),
    "gateway": Benchmark("CPU, added latency and throughput of the gateway itself", SYSTEM),
    "isolation": Benchmark("whether a workspace can tell what another has cached", SYSTEM),
    "routing": Benchmark("prefix-aware routing, ours and other people's", SYSTEM),
    "throughput": Benchmark("throughput on a shared prefix, ours and other engines",
                            ("engine", "test", "bench")),
    "ttft": Benchmark("time to the first token with and without a cached prefix", SYSTEM),
}  # fmt: skip
ELSEWHERE = {"vllm_leases": "what our connector costs vLLM: run it with vLLM's own Python"}


def main(arguments: list[str]) -> int:
    name, *more = arguments or [""]
    if name not in BENCHMARKS:
        print(__doc__)
        for known, benchmark in BENCHMARKS.items():
            print(f"  {known:12} {benchmark.about}")
        for known, about in ELSEWHERE.items():
            print(f"  {known:12} {about}")
        return 0 if name in ("", "-h", "--help") else 2
    try:
        install(list(BENCHMARKS[name].needs))
    except InstallError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    os.chdir(ROOT)
    command = [*python(f"scripts.bench.{name}"), *more]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
