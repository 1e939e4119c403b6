"""Every benchmark from one place: it installs what the benchmark needs, then runs it.

    python -m scripts.bench                    lists them
    python -m scripts.bench NAME [arguments]   `python -m scripts.bench NAME --help` for these

Each benchmark is a module as well (`python -m scripts.bench.NAME`), for an environment that has
everything it needs.
"""

import os
import sys

from scripts.setup.install_needs import InstallError, install
from scripts.stack import ROOT, python

NEEDS = ["gateway", "engine", "dashboard", "test", "bench"]
BENCHMARKS = {
    "compressed": "what a part of a prefix costs in quality, and saves",
    "dashboard": "how soon each page shows its numbers, and ten sessions",
    "flood": "what a flood leaves of a leased, a best-effort and an unmarked prefix",
    "gateway": "CPU, added latency and throughput of the gateway itself",
    "growth": "200 engines, a million prefixes, a large ledger: routing, restarts, admin calls",
    "reuse": "what an order of reuse reads in tight memory, beside LRU and Belady's bound",
    "throughput": "throughput on a shared prefix, ours and vLLM's",
    "ttft": "time to the first token with and without a cached prefix",
    "variants": "what reading the entries of a fine-tuned sibling costs in quality",
}
ELSEWHERE = {
    "vllm_leases": "what our connector costs vLLM: run it with vLLM's own Python",
}


def main(arguments: list[str]) -> int:
    name, *more = arguments or [""]
    if name not in BENCHMARKS:
        print(__doc__)
        for benchmark, about in (BENCHMARKS | ELSEWHERE).items():
            print(f"  {benchmark:12} {about}")
        return 0 if name in ("", "-h", "--help") else 2
    try:
        install(NEEDS)
    except InstallError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    os.chdir(ROOT)
    command = [*python(f"scripts.bench.{name}"), *more]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
