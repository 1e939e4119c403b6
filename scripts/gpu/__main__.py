"""The native engine on a GPU: is it exact, how fast is it, and how much memory does it take?

    scripts/gpu_check [--out DIR]      a GPU; writes gpu_check.json and gpu_check.md
    scripts/gpu_check --interpret      exactness alone, with Triton's interpreter on a CPU

It fetches nothing. The speed is that of a model of Llama 3 8B's shape with random weights in
bfloat16, which are made on the device.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench.report import markdown
from scripts.setup.options import parse

LIMIT_SECONDS = 500.0


def main() -> int:
    options = parse(
        __doc__,
        interpret=(False, "exactness alone, on a CPU"),
        small=(False, "a tiny model, also without a GPU: to try this script"),
        out=(".", "folder of the JSON and the Markdown"),
    )
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    import torch

    if options.interpret:
        return 0 if exactness(torch.device("cpu")) else 1
    is_gpu = torch.cuda.is_available()
    if not is_gpu and not options.small:
        print("there is no GPU here: not run (--interpret: exactness on a CPU)")
        return 2
    begun = time.perf_counter()
    device = torch.device("cuda" if is_gpu else "cpu")
    is_exact = exactness(device) if is_gpu else True
    from scripts.gpu import speed

    results: dict[str, Any] = {
        "chip": torch.cuda.get_device_name() if is_gpu else "no GPU",
        "torch": torch.__version__,
        "exact": is_exact,
        "rows": [],
    }
    deadline = begun + LIMIT_SECONDS
    sizes = speed.small() if options.small else speed.llama_8b()
    for subject, figure in speed.measure(deadline, sizes, device):
        results["rows"].append([subject, figure])
        print(f"{subject}: {figure}", flush=True)
    write(Path(options.out), results)
    return 0 if is_exact else 1


def exactness(device: Any) -> bool:
    """Print each comparison; whether all are within what is allowed."""
    import torch

    from scripts.gpu.exactness import (
        ALLOWED,
        FEW_SHAPES,
        SHAPES,
        SMALL,
        SMALLER,
        kernel_differences,
        model_differences,
    )

    def compared() -> Iterator[tuple[str, float, float]]:
        is_gpu = device.type == "cuda"
        dtypes = (torch.float32, torch.bfloat16, torch.float16) if is_gpu else (torch.float32,)
        for dtype in dtypes:
            shapes = SHAPES if is_gpu else FEW_SHAPES
            for what, difference in kernel_differences(device, dtype, shapes):
                yield f"{dtype} {what}", difference, ALLOWED[dtype]
        num_tokens, sizes = (150, SMALL) if is_gpu else (60, SMALLER)
        for what, difference in model_differences(device, num_tokens, sizes):
            yield f"model {what}", difference, 1e-4

    torch.backends.cuda.matmul.allow_tf32 = False
    worst, wrong = 0.0, 0
    for what, difference, allowed in compared():
        is_right = difference <= allowed
        wrong += not is_right
        worst = max(worst, difference / allowed)
        print(f"{'ok   ' if is_right else 'WRONG'} {difference:.1e} {what}", flush=True)
    print(f"{wrong} wrong; the largest difference is {worst:.2f} of what is allowed")
    return wrong == 0


def write(folder: Path, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    text = markdown((f"{results['chip']}, torch {results['torch']}", "measured"), results["rows"])
    (folder / "gpu_check.md").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
