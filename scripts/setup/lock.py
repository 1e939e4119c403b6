"""Write requirements.lock: every package of every locked need, pinned, with its files' hashes.

    python -m scripts.setup.lock [--upgrade]

One resolution by uv fits all needs together, for every platform and Python 3.11 or newer. Pins
that still fit are kept, unless `--upgrade` is given. Above each entry stands which needs it is for,
so that an installation of one extra takes its own packages and no others. Neither a URL nor the
name of an index is written. torch is left out, with what only its CUDA build needs; see
install_needs.py.
"""

import os
import re
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

from scripts.setup.install_needs import (
    FOR,
    LOCK,
    ROOT,
    UNHASHED,
    install,
    read_project,
    requirements_of,
)
from scripts.setup.options import parse

NEEDS = (
    "base",
    "gateway",
    "postgres",
    "engine",
    "smollm2",
    "dashboard",
    "otel",
    "test",
    "check",
    "bench",
    "release",
)
LEFT_OUT = re.compile(rf"(?:{UNHASHED}|nvidia-.*|cuda-.*)==")
OF_CUDA = re.compile("triton==")
HEAD = f"""\
# Written by `python -m scripts.setup.lock`, read by scripts/setup/install_needs.py.
# {UNHASHED} and what only its CUDA build needs are not here: see install_needs.py.
"""


def main() -> None:
    options = parse(__doc__, upgrade=(False, "take the newest that fits"))
    install(["release"])
    project = read_project()
    needs = {need: requirements_of(need, project) for need in NEEDS}
    with tempfile.TemporaryDirectory() as name:
        all_pins = Path(name, "all.txt")
        if not options.upgrade and (ROOT / LOCK).exists():
            all_pins.write_text((ROOT / LOCK).read_text("utf-8"), "utf-8")
        everything = compile_pins([*chain.from_iterable(needs.values())], all_pins)
        names = {need: set(compile_pins(pins, all_pins, all_pins)) for need, pins in needs.items()}
    lines = [HEAD]
    for pin, entry in everything.items():
        owners = [need for need in NEEDS if pin in names[need]]
        if OF_CUDA.match(pin):  # the build for a CPU does without; the tests ask for it by name
            owners = ["test"]
        if not LEFT_OUT.match(pin):
            lines.append(f"{FOR}{' '.join(owners)}\n{entry}\n")
    (ROOT / LOCK).write_text("".join(lines), "utf-8")
    print(f"{len(lines) - 1} packages in {LOCK}")


def compile_pins(
    requirements: list[str], output: Path, constraints: Path | None = None
) -> dict[str, str]:
    """Resolve with uv. Return the entries with their hashes, by "name==version; marker"."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "-"]
    if constraints is None:
        command += ["--generate-hashes", "--output-file", str(output)]
    else:
        command += ["--constraints", str(constraints)]
    # A folder of wheels may have builds that no index has.
    environment = {name: v for name, v in os.environ.items() if name != "UV_FIND_LINKS"}
    process = subprocess.run(
        command, input="\n".join(requirements), env=environment, capture_output=True, text=True
    )
    if process.returncode != 0:
        sys.exit(f"lock: uv failed:\n{process.stderr}")
    text = process.stdout if constraints is not None else output.read_text("utf-8")
    entries = re.split(r"\n(?=\S)", text.strip())
    pins = {re.split(r" (?:;|\\)", entry)[0].strip(): entry for entry in entries}
    return {pin: entry for pin, entry in pins.items() if pin and not pin.startswith("#")}


if __name__ == "__main__":
    main()
