"""The native engine on a GPU: is it exact, how fast is it, and how much memory does it take?

    scripts/gpu_check [--out DIR]      a GPU; writes gpu_check.md
    scripts/gpu_check --interpret      exactness alone, with Triton's interpreter on a CPU
    scripts/gpu_check --decode         decoding alone, by CUDA graphs and without, and vLLM's
    scripts/gpu_check --tiers          leases below vLLM's blocks alone, where vLLM is installed

It fetches nothing. The speed is that of a model of Llama 3 8B's shape with random weights in
bfloat16, which are made on the device. What was found out so far is in the file at any time.
"""

import faulthandler
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.bench.report import markdown
from scripts.gpu.tiers import tiers
from scripts.setup.options import parse

if TYPE_CHECKING:
    import torch

# No part begins later than the second; comparisons, which mostly wait for Triton's compiler, end
# with the first. A part that hangs ends the process with the third.
EXACT_SECONDS = 240.0
LIMIT_SECONDS = 440.0
HARD_SECONDS = 530.0
Row = tuple[str, str]
"""A subject and its figure."""


class Report:
    """Rows that are printed as they come. With a folder they are also written to a file, below the
    heading."""

    def __init__(self, folder: Path | None, heading: str = "") -> None:
        self._folder = folder
        self._heading = heading
        self.rows: list[Row] = []
        self.has_failed = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, subject: str, figure: str) -> None:
        self.rows.append((subject, figure))
        print(f"{subject}: {figure}", flush=True)
        if self._folder is not None:
            text = markdown((self._heading, "measured"), self.rows)
            (self._folder / "gpu_check.md").write_text(text + "\n", "utf-8")

    def run(self, subject: str, part: Callable[[], Iterable[Row]]) -> None:
        """Add the rows of a part, and why it failed. An error of one part does not end the
        others."""

        def add_all() -> None:
            for row in part():
                self.add(*row)

        failure = failure_of(add_all)
        if failure:
            self.has_failed = True
            self.add(subject, f"failed: {failure}")


def failure_of(work: Callable[[], object]) -> str:
    """Run a part. Return the error's kind and its first line, or an empty text."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the edge of a part
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
    return ""


def main() -> int:
    options = parse(
        __doc__,
        interpret=(False, "exactness alone, on a CPU"),
        tiers=(False, "leases that outlive vLLM's blocks alone; without a GPU in files of vLLM's"),
        decode=(False, "decoding alone, and vLLM's where it is installed"),
        small=(False, "a tiny model, also without a GPU: to try this script"),
        out=(".", "folder of the Markdown"),
    )
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    if options.tiers:
        report = Report(Path(options.out), "vLLM's tiers")
        report.run("vLLM's tiers", tiers)
        return 1 if report.has_failed else 0
    import torch

    begun = time.perf_counter()
    if options.interpret:
        report = Report(None)
        report.run("exactness", partial(exactness, torch.device("cpu"), report, float("inf")))
        return 1 if report.has_failed else 0
    is_gpu = torch.cuda.is_available()
    if not is_gpu and not options.small:
        print("there is no GPU here: not run (--interpret: exactness on a CPU)")
        return 2
    device = torch.device("cuda" if is_gpu else "cpu")
    chip = torch.cuda.get_device_name() if is_gpu else "no GPU"
    report = Report(Path(options.out), f"{chip}, torch {torch.__version__}")
    faulthandler.dump_traceback_later(HARD_SECONDS, exit=True)
    try:
        if is_gpu and not options.decode:
            deadline = begun + EXACT_SECONDS
            report.run("exactness", partial(exactness, device, report, deadline))
            report.run("architectures", partial(architectures, device, deadline))
        measure_speed(
            report,
            device,
            begun + LIMIT_SECONDS,
            is_small=options.small,
            decodes_alone=options.decode,
        )
        if is_gpu:
            report.add("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 1 if report.has_failed else 0


def measure_speed(
    report: Report,
    device: "torch.device",
    deadline: float,
    *,
    is_small: bool,
    decodes_alone: bool,
) -> None:
    """Measure one model. No measurement begins after the `deadline`, by `time.perf_counter`."""
    from engine.compute.loading import LoadedModel
    from scripts.gpu import speed
    from scripts.gpu.beside_vllm import vllm_decoding

    sizes = speed.small() if is_small else speed.llama_8b()
    loaded: list[LoadedModel] = []
    report.run("load", lambda: speed.load(sizes, device, loaded))
    decoding = [speed.decoding, speed.graphs]
    parts = decoding if decodes_alone else [speed.first_tokens, *decoding, speed.host_tier]
    for part in parts if loaded else ():
        subject = part.__name__.replace("_", " ")
        if time.perf_counter() > deadline:
            report.add(subject, "not run: no time left")
            continue
        report.run(subject, partial(part, loaded[0], sizes))
        speed.free_memory()
    if decodes_alone:
        loaded.clear()
        speed.free_memory()
        report.run("vLLM's decoding", partial(vllm_decoding, sizes))


def exactness(device: "torch.device", report: Report, deadline: float) -> Iterator[Row]:
    """Print each comparison. Return a row that says whether all differences are allowed."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    wrong = 0
    right = 0
    skipped = 0
    for comparison, compare, allowed in comparisons(device):
        if time.perf_counter() > deadline:
            skipped += 1
            continue
        differences: list[float] = []
        failure = failure_of(lambda: differences.append(compare()))  # noqa: B023 - called at once
        is_right = not failure and differences[0] <= allowed
        wrong = wrong + (not is_right)
        right = right + is_right
        worst = max([worst, *(difference / allowed for difference in differences)])
        result = failure or f"{differences[0]:.1e}"
        print(f"{'ok   ' if is_right else 'WRONG'} {result} {comparison}", flush=True)
    report.has_failed |= wrong > 0
    yield (
        "comparisons with plain attention",
        f"{right} right, {wrong} wrong, {skipped} not run; the largest difference is {worst:.2f} of"
        " what is allowed",
    )


def architectures(device: "torch.device", deadline: float) -> Iterator[Row]:
    """Tiny models of each architecture, checked as at every start."""
    import torch

    from engine.compute.errors import ModelRefused
    from engine.compute.loading import prepare_model
    from scripts.docs.models import ARCHITECTURES, tiny_model

    served: Counter[str] = Counter()
    refused: list[str] = []
    skipped = 0
    for name in ARCHITECTURES:
        if time.perf_counter() > deadline:
            skipped += 1
            continue
        try:
            model = tiny_model(name)
            torch.nn.Module.to(model, device)
            loaded = prepare_model(model)
            served[loaded.attention] += 1
            result = f"{loaded.attention} {loaded.why_no_kernel or ''}"
        except ModelRefused as refusal:
            refused.append(name)
            result = f"refused: {refusal}"
        print(f"{name}: {result}", flush=True)
    exact = ", ".join(f"{count} by {attention}" for attention, count in served.items())
    yield "tiny models of architectures, float32, exact", f"{exact}; {skipped} not run"
    yield "architectures refused", ", ".join(refused) or "none"


def comparisons(device: "torch.device") -> Iterator[tuple[str, Callable[[], float], float]]:
    """Each type with its allowed difference. The type with which a GPU serves comes first."""
    import torch

    from scripts.gpu import exactness as exact

    is_gpu = device.type == "cuda"
    shapes = exact.SHAPES if is_gpu else exact.FEW_SHAPES
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if is_gpu else (torch.float32,):
        for comparison, compare in exact.kernel_comparisons(device, dtype, shapes):
            yield f"{dtype} {comparison}", compare, exact.ALLOWED[dtype]


if __name__ == "__main__":
    sys.exit(main())
