"""C++ source to a loaded library, where the machine has a compiler.

The library is compiled once for a machine, a source and its constants, and kept in the user's cache
(`XDG_CACHE_HOME`, else `~/.cache`), as torch and Triton keep theirs. Where that can't be written
to, or is others' to write to, each process compiles anew. `CXX` names another compiler than g++.
"""

import ctypes
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

_COMPILER_SECONDS = 120
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC")


class NotCompiled(Exception):
    """There is no compiler, or it did not take the source, or the result can't be loaded."""


def load_library(source: Path, constants: Mapping[str, int]) -> ctypes.CDLL:
    """The library of `source` compiled with `constants` as macros. Raises NotCompiled."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    macros = [f"-D{name}={value}" for name, value in constants.items()]
    command = [*compiler, *_FLAGS, *macros]
    try:
        with _folder() as folder:
            library = folder / f"{_digest(source, compiler, command)}.so"
            if not library.exists():
                _compile(source, compiler, command, library)
            return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise NotCompiled(f"{compiler[0]} failed: {last}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"no library by {compiler[0]}: {error}") from error


def _compile(source: Path, compiler: list[str], command: list[str], library: Path) -> None:
    """Another process may do the same: the last one's file stays, and both are alike."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        _run([*command, "-c", str(source), "-o", str(compiled)])
        # Without OpenMP's library: torch has loaded its own, and two would each have threads.
        _run([*compiler, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(library)


def _run(command: list[str]) -> str:
    """Its output. The compiler is the operator's own, and the source is the package's."""
    done = subprocess.run(  # noqa: S603
        command, check=True, capture_output=True, text=True, timeout=_COMPILER_SECONDS
    )
    return done.stdout


def _digest(source: Path, compiler: list[str], command: list[str]) -> str:
    """Of all that the library's code depends on. `native` is the processor, by its flags."""
    state = blake2b(source.read_bytes(), digest_size=16)
    for part in (*command, _run([*compiler, "--version"]), platform.machine(), _processor()):
        state.update(f"{part}\n".encode())
    return state.hexdigest()


def _processor() -> str:
    """The lines of the first processor that name it and what it can."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in text.splitlines() if line.startswith(names))


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
