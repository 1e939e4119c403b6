"""Packages that others import where they are installed, and that nothing here needs.

Each is kept from being imported as if it were not installed: it costs every process that runs
tests two seconds of CPU time. Beside vLLM, which may need them, they stay.
"""

import sys
from importlib.util import find_spec

UNNEEDED = (
    "rfc3987_syntax",  # jsonschema, for IRIs: it builds a parser
    "scipy",  # transformers, for losses of training; scripts/bench/isolation.py alone needs it
)

if find_spec("vllm") is None:
    for name in UNNEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
