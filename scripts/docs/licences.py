"""Write gateway/LICENCES.md: every package that an installation brings, and its licence.

The packages of each extra are those of requirements.lock. The installed packages name their own
licences. Run it after a change of dependencies, where all extras but vLLM are installed:
tests/scripts/test_lock.py fails until then. It ends with 1 when a package names no licence or is
not installed.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.setup.install_needs import is_unhashed, read_lock, read_project, requirements_of
from scripts.stack import ROOT

FILE = ROOT / "gateway" / "LICENCES.md"
# vLLM brings two hundred packages of its own, by machine; `pip-licenses` there lists them.
EXTRAS = ("gateway", "postgres", "engine", "dashboard")
HEAD = """# Licences of dependencies

What `pip install '.[gateway,postgres,engine,dashboard]'` brings, and the licence that each
package names in its own metadata. Written by `python -m scripts.docs.licences`. Holdfast itself is
Apache-2.0.

"""


class Unknown(Exception):
    """A package that is not installed, or says nothing of its licence."""


def packages_of(need: str) -> set[str]:
    """Canonical names of all packages that the base or an extra brings on this platform."""
    pins = [entry.partition(" \\")[0] for entry in read_lock()[need]]
    pins += [text for text in requirements_of(need, read_project()) if is_unhashed(text)]
    return {
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, pins)
        if not requirement.marker or requirement.marker.evaluate()
    }


def licence_of(name: str) -> str:
    """The SPDX expression if the package has one, else its classifiers, else its own words."""
    try:
        metadata = distribution(name).metadata
    except PackageNotFoundError:
        raise Unknown(f"{name} is not installed") from None
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    prefix = "License :: OSI Approved :: "
    lines = metadata.get_all("Classifier") or []
    classified = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    words = metadata["License"].strip().splitlines() if "License" in metadata else []
    if not classified and not words:
        raise Unknown(f"{name} names no licence")
    return ", ".join(classified) or words[0]


def text() -> str:
    """The page, as Markdown."""
    extras_of: dict[str, set[str]] = {}
    for extra in ("base", *EXTRAS):
        for name in packages_of(extra):
            extras_of.setdefault(name, set()).add(extra)
    rows = []
    for name, extras in sorted(extras_of.items()):
        note = "" if "base" in extras else f" ({', '.join(sorted(extras))})"
        rows.append(f"- {name}: {licence_of(name)}{note}\n")
    return HEAD + "".join(rows)


def main() -> int:
    try:
        FILE.write_text(text(), "utf-8")
    except Unknown as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
