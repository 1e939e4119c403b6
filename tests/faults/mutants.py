"""The seeded-bug matrix: each patch of tests/mutants/ puts one bug in, and the tests must notice.

    python -m tests.faults.mutants [NAME ...] [--tests "NODE ..."] [--folder tests/mutants/vllm]

Every mutant gets a copy of the tracked files in a temporary folder; the work tree is never touched.
Before that the unpatched copy must pass the same tests (the control): a test that fails anyway
kills nothing. A run that takes many times the control's time hangs, and a hang kills too. Names
are beginnings of file names: `05` will do. `--tests` asks instead of a patch's own tests what else
would notice. The tests run with the Python that runs this: `tests/mutants/vllm` needs vLLM's.
Exits 1 where a mutant survives, 2 where a patch does not apply or the control fails.

Examples are the same in every run (Hypothesis' profile `mutants` of tests/conftest.py), so that a
verdict is repeatable; BLOCK_EXAMPLES and BLOCK_STEPS set how many the state machine takes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.options import new_parser
from scripts.stack import ROOT

PATCHES = ROOT / "tests" / "mutants"
FIELDS = ("Bug", "User", "Tests", "Kind")
KINDS = ("T2", "stranger")
CONTROL_SECONDS = 600.0
MIN_SECONDS = 120.0
HANG_FACTOR = 10
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_TIMEOUT = re.compile(r"^E?\s*(?:Failed: )?Timeout ", re.MULTILINE)


class BadMutant(Exception):
    """A patch without its header, one that does not apply, or a control that fails."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One patch; `bug` and `user` say what is wrong and what it costs, `tests` are pytest nodes."""

    path: Path
    bug: str
    user: str
    tests: tuple[str, ...]
    kind: str

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one run of tests: `killer` is the test that failed first, None if none did."""

    killer: str | None
    seconds: float


def read_mutant(path: Path) -> Mutant:
    """A patch and its header: `Name: text` lines, continued where a line begins with a space.

    Raises BadMutant for a field that is missing, empty, unknown or there twice.
    """
    header = re.split(r"^--- ", path.read_text("utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
    fields: dict[str, str] = {}
    for line in re.sub(r"\n +", " ", header).splitlines():
        if line.strip():
            name, colon, text = line.partition(":")
            if not colon or name not in FIELDS or name in fields or not text.strip():
                raise BadMutant(f"{path.name}: a header line that is not one of {FIELDS}: {line!r}")
            fields[name] = text.strip()
    if missing := [name for name in FIELDS if name not in fields]:
        raise BadMutant(f"{path.name}: the header lacks {', '.join(missing)}")
    if fields["Kind"] not in KINDS:
        raise BadMutant(f"{path.name}: Kind is one of {KINDS}")
    tests = tuple(fields["Tests"].split())
    return Mutant(path, fields["Bug"], fields["User"], tests, fields["Kind"])


def all_mutants(folder: Path = PATCHES) -> list[Mutant]:
    return [read_mutant(path) for path in sorted(folder.glob("*.patch"))]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """The tracked files as they are now, in a folder of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(folder)


def apply_patch(mutant: Mutant, tree: Path, *, check: bool = False) -> None:
    """Patch a copy, or with `check` only see whether it could be. Raises BadMutant if not."""
    # Inside some other repository git would look there and silently skip everything.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *(["--check"] if check else []), str(mutant.path)]
    process = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise BadMutant(f"{mutant.name} does not apply any more:\n{process.stderr.strip()}")


def run_tests(tree: Path, tests: Sequence[str], limit: float) -> Verdict:
    """Run pytest in a copy until the first failure, at most about `limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", "--hypothesis-profile=mutants", f"--timeout={limit:.0f}"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit + 30)
    except subprocess.TimeoutExpired:
        return Verdict("(hang)", time.monotonic() - began)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    seconds = time.monotonic() - began
    if process.returncode == 0:
        return Verdict(None, seconds)
    failure = _FAILED.search(output)
    if process.returncode != 1 or failure is None:
        # Nothing ran, or pytest itself failed: that says nothing of the bug.
        raise BadMutant(f"pytest ended with {process.returncode}:\n{output[-4000:]}")
    return Verdict(failure[1] + (" (hang)" if _TIMEOUT.search(output) else ""), seconds)


def control_seconds(tests: Sequence[str]) -> float:
    """How long the tests take without a bug.

    Raises BadMutant where they fail, or where they would import another tree than the copy.
    """
    with copied_tree() as tree:
        code = "import engine, gateway; print(engine.__file__, gateway.__file__, sep='\\n')"
        process = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            check=True,
            text=True,
        )
        for imported in process.stdout.splitlines():
            if not Path(imported).resolve().is_relative_to(tree.resolve()):
                raise BadMutant(f"the copy's tests would import {imported}")
        verdict = run_tests(tree, tests, CONTROL_SECONDS)
    if verdict.killer is not None:
        raise BadMutant(f"without any bug {verdict.killer} fails")
    return verdict.seconds


def try_mutant(mutant: Mutant, tests: Sequence[str], limit: float) -> Verdict:
    with copied_tree() as tree:
        apply_patch(mutant, tree)
        return run_tests(tree, tests, limit)


def chosen(names: Sequence[str], folder: Path) -> list[Mutant]:
    """The mutants of a folder that these names begin, all without any.

    Raises BadMutant for an unknown name, or a folder that has none.
    """
    mutants = all_mutants(folder)
    if not mutants:
        raise BadMutant(f"no mutants in {folder}")
    for name in names:
        if not any(mutant.name.startswith(name) for mutant in mutants):
            raise BadMutant(f"no mutant begins with {name!r}")
    return [m for m in mutants if not names or m.name.startswith(tuple(names))]


def matrix(mutants: Sequence[Mutant], instead: Sequence[str]) -> int:
    """Print the table; how many survived."""
    controls: dict[tuple[str, ...], float] = {}
    for tests in {tuple(instead) or mutant.tests: None for mutant in mutants}:
        controls[tests] = control_seconds(tests)
        print(f"control  {controls[tests]:6.1f} s  {' '.join(tests)}", flush=True)
    survivors = 0
    width = max(len(mutant.name) for mutant in mutants)
    for mutant in mutants:
        tests = tuple(instead) or mutant.tests
        limit = max(MIN_SECONDS, HANG_FACTOR * controls[tests])
        verdict = try_mutant(mutant, tests, limit)
        survivors += verdict.killer is None
        outcome = f"killed by {verdict.killer}" if verdict.killer else "SURVIVED"
        kind = f"{mutant.kind:8}"
        print(f"{mutant.name:{width}}  {kind}  {verdict.seconds:6.1f} s  {outcome}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} killed")
    return survivors


def main() -> int:
    parser = new_parser(
        __doc__,
        tests=("", "these instead of the patches' own"),
        folder=(PATCHES, "where the patches are"),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the first letters of a patch")
    arguments = parser.parse_args()
    began = time.monotonic()
    # SIGTERM must end this as an exception does, so that copies and their tests are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        survivors = matrix(
            chosen(arguments.names, arguments.folder.resolve()), arguments.tests.split()
        )
    except BadMutant as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
