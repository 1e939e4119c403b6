"""Builds the kernel for CPUs before its model is known, for an image without a compiler.

    python -m engine.compute.attention.prebuilt FOLDER

It builds one library for each combination of a head's size, a type of keys and values, and a level
of the processor. It needs a C++ compiler and nothing but Python's standard library. The engine
looks for the libraries in `BUILT`.
"""

import sys
from itertools import product
from pathlib import Path

from engine.compute.compiler import Constants, build

SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
BUILT = Path(__file__).with_name("build")
LANES = 64
"""The lanes of a wide tile: query rows x heads of one KV head. Its keys are read once for all."""
ELEMENTS = ("float32", "bfloat16", "float16")
"""The types that the kernel reads. A type's index is `ELEMENT` of cpu_kernel.cpp."""
HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)


def constants_of(head_dim: int, element: str, lanes: int = LANES) -> Constants:
    """The macros of a library. Raises ValueError for a type that the kernel does not read."""
    return {
        "HEAD_DIM": head_dim,
        "LANES": max(lanes, LANES),
        "ELEMENT": ELEMENTS.index(element),
    }


def main(arguments: list[str]) -> int:
    (folder,) = arguments
    variants = [constants_of(*shape) for shape in product(HEAD_DIMS, ELEMENTS)]
    libraries = build(SOURCE, variants, Path(folder))
    size = sum(path.stat().st_size for path in libraries)
    print(f"{len(libraries)} libraries, {size / 1e6:.1f} MB, in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
