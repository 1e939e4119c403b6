"""Write a software bill of materials (CycloneDX, JSON) of what an installation brings.

    python -m scripts.docs.sbom [--out holdfast.cdx.json] [NEED ...]     default: all four extras

The components are those of requirements.lock with the hashes of their files, and torch, which has
none there. It is made by cyclonedx-bom, from the same entries that scripts/install installs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.setup.install_needs import (
    LOCK,
    ROOT,
    install,
    is_unhashed,
    read_project,
    requirements_of,
    show,
)
from scripts.setup.options import new_parser

EXTRAS = ("gateway", "postgres", "engine", "dashboard")


def main() -> None:
    parser = new_parser(__doc__, out=Path("holdfast.cdx.json"))
    parser.add_argument("needs", nargs="*", default=EXTRAS, metavar="NEED")
    options = parser.parse_args()
    install(["release"])
    with tempfile.TemporaryDirectory() as name:
        show(Path(name), list(options.needs))
        listed = Path(name, LOCK)
        project = read_project()
        unhashed = {
            r for need in options.needs for r in requirements_of(need, project) if is_unhashed(r)
        }
        listed.write_text("\n".join([listed.read_text("utf-8"), *sorted(unhashed)]), "utf-8")
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", str(listed)]
        command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"]
        command += ["--output-format", "JSON", "--output-file", str(options.out)]
        subprocess.run(command, check=True)
    components = json.loads(options.out.read_text("utf-8"))["components"]
    print(f"{len(components)} components in {options.out}")


if __name__ == "__main__":
    main()
