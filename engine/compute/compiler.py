"""Loads the library of a C++ source, which was built ahead or is compiled on this machine.

`build` makes libraries ahead, in a folder of their own: one for each source, set of constants and
level of the processor (`LEVELS`). A level is a published set of instructions. A library is loaded
only if the processor has all instructions of its level.

Without such a library the source is compiled, once for each machine and set of constants. The
result is kept in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), as torch and Triton keep
theirs. If that folder can't be written to, or others may write to it, each process compiles anew.
`CXX` names another compiler than g++.
"""

import ctypes
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

Constants = Mapping[str, int]
"""Macros of a source, by name."""

NATIVE = "native"
"""The level of a library that was compiled here, for this very processor."""
_COMPILER_SECONDS = 120
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fPIC")
# The instructions of the x86-64 psABI's levels, by the kernel's names (/proc/cpuinfo).
_V3 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions."""

    # The compiler's name of it.
    name: str
    # The flags of a processor that has it, by the kernel's names.
    needs: frozenset[str]


LEVELS = {
    "x86_64": (
        Level("x86-64-v4", frozenset(_V4.split())),
        Level("x86-64-v3", frozenset(_V3.split())),
    ),
    "aarch64": (Level("armv8-a", frozenset()),),
}
"""The levels of each machine, the best first. A machine has the kernel's name."""


class NotCompiled(Exception):
    """There is no compiler, or it refused the source, or the result can't be loaded."""


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled kernel."""

    code: ctypes.CDLL
    # The instruction set that it was built for, or NATIVE.
    level: str


def load_library(source: Path, constants: Constants, built: Path | None = None) -> Library:
    """The library of `source` with `constants` as macros, from the folder `built` if that has it.

    Raises NotCompiled.
    """
    library = None if built is None else _load_built(source, constants, built)
    return _load_compiled(source, constants) if library is None else library


def _load_built(source: Path, constants: Constants, folder: Path) -> Library | None:
    flags = next((line.split() for line in _processor() if line.startswith("flags")), [])
    for level in levels_of(platform.machine(), frozenset(flags)):
        path = folder / _built_name(source, constants, level)
        with suppress(OSError):  # not there, or of another C library
            return Library(ctypes.CDLL(str(path)), level.name)
    return None


def _load_compiled(source: Path, constants: Constants) -> Library:
    compiler = _compiler()
    command = [*compiler, *_options(NATIVE, constants)]
    with _compiler_failures(compiler), _library_folder() as folder:
        # The digest covers all that the library's code depends on. `-march=native` depends on the
        # processor, whose flags are part of it.
        state = blake2b(source.read_bytes(), digest_size=16)
        for part in (*command, _run([*compiler, "--version"]), platform.machine(), *_processor()):
            state.update(f"{part}\n".encode())
        library = folder / f"{state.hexdigest()}.so"
        if not library.exists():
            _compile(source, compiler, command, library)
        return Library(ctypes.CDLL(str(library)), NATIVE)


def build(source: Path, variants: Sequence[Constants], folder: Path) -> list[Path]:
    """Build a library for each variant and each level of this machine. Return the files.

    Raises NotCompiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiler = _compiler()
    jobs = []
    for level in LEVELS.get(platform.machine(), ()):
        for constants in variants:
            command = [*compiler, *_options(level.name, constants)]
            jobs.append((source, compiler, command, folder / _built_name(source, constants, level)))
    with ThreadPoolExecutor(os.cpu_count()) as threads, _compiler_failures(compiler):
        list(threads.map(lambda job: _compile(*job), jobs))
    return [library for *_, library in jobs]


def levels_of(machine: str, flags: Set[str]) -> list[Level]:
    """The levels that a processor with `flags` has, the best first."""
    return [level for level in LEVELS.get(machine, ()) if level.needs <= flags]


def _built_name(source: Path, constants: Constants, level: Level) -> str:
    """The name of a library's file. Another source, constants or options give another name."""
    state = blake2b(source.read_bytes(), digest_size=16)
    state.update("\n".join(_options(level.name, constants)).encode())
    return f"{source.stem}-{level.name}-{state.hexdigest()}.so"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _options(level: str, constants: Constants) -> list[str]:
    macros = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    return [*_FLAGS, f"-march={level}", *macros]


@contextmanager
def _compiler_failures(compiler: Sequence[str]) -> Iterator[None]:
    """Raise NotCompiled, with a message of one line, for a failure inside this context."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise NotCompiled(f"{compiler[0]} failed: {last}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"no library by {compiler[0]}: {error}") from error


def _compile(source: Path, compiler: list[str], command: list[str], library: Path) -> None:
    """Compile the library. If two processes do so at once, the later file stays. Both are alike."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = Path(folder, "kernel.o")
        linked = Path(folder, "kernel.so")
        _run([*command, "-c", str(source), "-o", str(compiled)])
        # OpenMP's library is left out. Torch has loaded its own, and two would each start threads.
        _run([*compiler, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(library)


def _run(command: list[str]) -> str:
    """The command's output. The compiler is the operator's own, and the source is the package's."""
    process = subprocess.run(  # noqa: S603
        command, check=True, capture_output=True, text=True, timeout=_COMPILER_SECONDS
    )
    return process.stdout


def _processor() -> list[str]:
    """The lines of /proc/cpuinfo that name the first processor and its abilities."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    names = ("model name", "flags", "Features", "CPU part")
    return [line for line in text.splitlines() if line.startswith(names)]


@contextmanager
def _library_folder() -> Iterator[Path]:
    """The folder that keeps libraries, or a temporary one for this context.

    A library runs in this process. So the folder must be this user's, and no other may write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "holdfast" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        is_ours = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    except (OSError, RuntimeError):
        is_ours = False
    if is_ours and os.access(folder, os.W_OK):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-kernels-") as name:
        yield Path(name)
