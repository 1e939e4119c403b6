"""C++ source to a loaded library: built before for this kind of processor, or compiled here.

Libraries that were built before lie in a folder of their own (`build`), one for each source, its
constants and a level of the processor (`LEVELS`). A level is a published set of instructions, and
one is loaded only where the processor has them all.

Where there is none, the library is compiled once for a machine, a source and its constants. It is
kept in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), as torch and Triton keep theirs. Where
that can't be written to, or is others' to write to, each process compiles anew. `CXX` names another
compiler than g++.
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
# The x86-64 psABI's levels, by the kernel's names of what each adds (/proc/cpuinfo).
_V3 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions: the compiler's name of it, and the flags of a processor with it."""

    name: str
    needs: frozenset[str]


LEVELS = {
    "x86_64": (
        Level("x86-64-v4", frozenset(_V4.split())),
        Level("x86-64-v3", frozenset(_V3.split())),
    ),
    "aarch64": (Level("armv8-a", frozenset()),),
}
"""By the kernel's name of the machine, the best first."""


class NotCompiled(Exception):
    """There is no compiler, or it did not take the source, or the result can't be loaded."""


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled kernel."""

    code: ctypes.CDLL
    # The instruction set that it was built for, or NATIVE.
    level: str


def load_library(source: Path, constants: Constants, built: Path | None = None) -> Library:
    """The library of `source` with `constants` as macros, from the folder `built` if it has it.

    Raises NotCompiled.
    """
    flags = next((line.split() for line in _processor() if line.startswith("flags")), [])
    for level in levels_of(platform.machine(), frozenset(flags)) if built is not None else ():
        path = Path(built or "") / _built_name(source, constants, level)
        with suppress(OSError):  # not there, or of another C library
            return Library(ctypes.CDLL(str(path)), level.name)
    compiler = _compiler()
    command = [*compiler, *_options(NATIVE, constants)]
    with _failures_told(compiler), _folder() as folder:
        # A digest of all that the library's code depends on. `native` is the processor, by its
        # flags.
        state = blake2b(source.read_bytes(), digest_size=16)
        for part in (*command, _run([*compiler, "--version"]), platform.machine(), *_processor()):
            state.update(f"{part}\n".encode())
        library = folder / f"{state.hexdigest()}.so"
        if not library.exists():
            _compile(source, compiler, command, library)
        return Library(ctypes.CDLL(str(library)), NATIVE)


def build(source: Path, variants: Sequence[Constants], folder: Path) -> list[Path]:
    """Build a library for each variant and level of this machine; the files.

    Raises NotCompiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiler = _compiler()
    todo = []
    for level in LEVELS.get(platform.machine(), ()):
        for constants in variants:
            command = [*compiler, *_options(level.name, constants)]
            todo.append((source, compiler, command, folder / _built_name(source, constants, level)))
    with ThreadPoolExecutor(os.cpu_count()) as threads, _failures_told(compiler):
        list(threads.map(lambda arguments: _compile(*arguments), todo))
    return [library for *_, library in todo]


def levels_of(machine: str, flags: Set[str]) -> list[Level]:
    """Those that a processor with `flags` has, the best first."""
    return [level for level in LEVELS.get(machine, ()) if level.needs <= flags]


def _built_name(source: Path, constants: Constants, level: Level) -> str:
    """The name of a library's file. It differs where the source, the constants or the options
    do."""
    state = blake2b(source.read_bytes(), digest_size=16)
    state.update("\n".join(_options(level.name, constants)).encode())
    return f"{source.stem}-{level.name}-{state.hexdigest()}.so"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _options(level: str, constants: Constants) -> list[str]:
    macros = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    return [*_FLAGS, f"-march={level}", *macros]


@contextmanager
def _failures_told(compiler: Sequence[str]) -> Iterator[None]:
    """Raises NotCompiled for what goes wrong inside, in one line."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise NotCompiled(f"{compiler[0]} failed: {last}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"no library by {compiler[0]}: {error}") from error


def _compile(source: Path, compiler: list[str], command: list[str], library: Path) -> None:
    """Compile the library. Another process may do the same: the last one's file stays, and both are
    alike."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = Path(folder, "kernel.o")
        linked = Path(folder, "kernel.so")
        _run([*command, "-c", str(source), "-o", str(compiled)])
        # Without OpenMP's library: torch has loaded its own, and two would each have threads.
        _run([*compiler, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(library)


def _run(command: list[str]) -> str:
    """The command's output. The compiler is the operator's own, and the source is the package's."""
    done = subprocess.run(  # noqa: S603
        command, check=True, capture_output=True, text=True, timeout=_COMPILER_SECONDS
    )
    return done.stdout


def _processor() -> list[str]:
    """The lines of the first processor that name it and what it can."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    names = ("model name", "flags", "Features", "CPU part")
    return [line for line in text.splitlines() if line.startswith(names)]


@contextmanager
def _folder() -> Iterator[Path]:
    """Where libraries are kept, or a folder for this call: what runs is this user's alone."""
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
