"""Try another vLLM's Python over the compiled parts of the CPU build that is installed.

    PYTHON scripts/setup/vllm_overlay.py DIRECTORY VERSION

PYTHON is that of an environment made by scripts/install_vllm_cpu. DIRECTORY becomes an environment
that has all of its packages, but vLLM's Python from PyPI's wheel of VERSION, with the shared
libraries of the CPU build linked into it. There is no CPU build of each version, and this needs no
device. What a version changes in its compiled parts is not tried so. The first environment is not
changed. Ends with pip's status where the wheel can't be had.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

NEEDS = ("orjson",)
"""The packages that a later server imports and the CPU build's version did not need."""
COMMAND = """#!{python}
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""


def main(directory: Path, version: str) -> int:
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    cpu_info = packages / f"vllm-{version}+cpu.dist-info"
    if cpu_info.is_dir():
        return 0
    with TemporaryDirectory() as folder:
        print(
            f"==> {directory}: vLLM {version} over {distribution('vllm-cpu').version}", flush=True
        )
        pip_arguments = (
            f"vllm=={version}",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            folder,
        )
        download = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", *pip_arguments]
        )
        if download.returncode:
            return download.returncode
        venv.create(directory, with_pip=False, clear=True)
        [wheel] = Path(folder).glob("vllm-*.whl")
        unpack(wheel, packages)
        into = ("--no-deps", "--only-binary", ":all:", "--target", str(packages))
        needed = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *into, *NEEDS])
        if needed.returncode:
            return needed.returncode
    installed = Path(str(distribution("vllm-cpu").locate_file("")))
    for library in (installed / "vllm").rglob("*.so"):
        link = packages / library.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    # By `addsitedir`, so that what that environment itself points to is found as well.
    (packages / "base.pth").write_text(
        f"import site; site.addsitedir({str(installed)!r})\n", "utf-8"
    )
    write_command(directory / "bin")
    name_as_cpu_build(packages / f"vllm-{version}.dist-info", cpu_info, version)
    return 0


def unpack(wheel: Path, packages: Path) -> None:
    """All files but the wheel's own libraries, which need a device."""
    with ZipFile(wheel) as content:
        names = [name for name in content.namelist() if not name.endswith(".so")]
        content.extractall(packages, names)


def write_command(folder: Path) -> None:
    """`vllm` as pip would install it."""
    command = folder / "vllm"
    command.write_text(COMMAND.format(python=folder.absolute() / "python"), "utf-8")
    command.chmod(0o755)


def name_as_cpu_build(source: Path, target: Path, version: str) -> None:
    """vLLM chooses its platform by `cpu` in its version. The last step: it says that all is there.

    Its requirements are left out: they are those of the build for CUDA.
    """
    metadata = source / "METADATA"
    lines = metadata.read_text("utf-8").splitlines()
    kept_lines = [line for line in lines if not line.startswith("Requires-Dist:")]
    text = "\n".join(kept_lines).replace(
        f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1
    )
    metadata.write_text(text, "utf-8")
    os.rename(source, target)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
