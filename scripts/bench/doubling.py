"""Does what a request costs the gateway grow no faster than the request?

`python -m scripts.bench.doubling [--points N]` doubles each dimension of a request up to its bound
and prints the CPU time of reading it, planning it, taking its fingerprint and comparing that.
`tests/gateway/test_doubling.py` fails where a doubling costs more than GROWTH times as much.
"""

import sys

from scripts.setup.options import parse
from tests.doubling import GROWTH, curve_of, row
from tests.gateway.doubling_dialects import DIALECT_DIMENSIONS
from tests.gateway.doubling_requests import DIMENSIONS
from tests.gateway.doubling_state import STATE_DIMENSIONS


def main() -> int:
    points = parse(__doc__, points=(6, "sizes of each dimension")).points
    print(f"{'dimension':44} {'bound':>9} {'worst':>5} ms of CPU, up to the bound by doubling")
    worst = 0.0
    for dimension in [*DIMENSIONS, *DIALECT_DIMENSIONS, *STATE_DIMENSIONS]:
        curve = curve_of(dimension, points)
        worst = max(worst, curve.growth)
        print(row(curve), flush=True)
    print(f"worst doubling: {worst:.2f}, allowed: {GROWTH}")
    return int(worst > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
