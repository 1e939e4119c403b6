"""Packages that others import where they are installed, and that nothing here needs.

Each is kept from being imported as if it were not installed. They cost every process that runs
tests two seconds of CPU time each. This module is imported before
the tests are.
"""

import sys

UNNEEDED = (
    "rfc3987_syntax",  # jsonschema, for IRIs: it builds a parser
    "scipy",  # transformers, for losses of training; scripts/bench/isolation.py alone needs it
)

for name in UNNEEDED:
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
