"""Write gateway/LICENCES.md: every package that an installation brings, and its licence.

What needs what, and the licences, are what the installed packages say of themselves. Run it after a
change of dependencies, where all extras but vLLM are installed; tests/scripts/test_licences.py
fails when it was forgotten. Ends with 1 when a package names no licence, or is not installed.
"""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.stack import ROOT

FILE = ROOT / "gateway" / "LICENCES.md"
# vLLM brings two hundred packages of its own, by machine; `pip-licenses` there lists them.
EXTRAS = ("gateway", "postgres", "engine", "dashboard")
HEAD = """# Licences of dependencies

What `pip install holdfast[gateway,postgres,engine,dashboard]` brings, and the licence that each
package names in its own metadata. Written by `python -m scripts.docs.licences`. Holdfast itself is
Apache-2.0.

| package | licence | for |
|---|---|---|
"""


class Unknown(Exception):
    """A package that is not installed, or says nothing of its licence."""


@dataclass(frozen=True)
class Package:
    name: str
    licence: str
    parts: frozenset[str]


def declared() -> dict[str, list[str]]:
    """Requirements by the part that needs them: `base` and the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras: Mapping[str, list[str]] = project["optional-dependencies"]
    return {"base": project["dependencies"], **{name: extras[name] for name in EXTRAS}}


def installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise Unknown(f"{name} is not installed") from None


def closure(requirements: Iterable[str]) -> set[str]:
    """Canonical names of everything that these need on this platform."""
    found: set[str] = set()
    waiting = [(Requirement(text), frozenset[str]()) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, asked = waiting.pop()
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in asked or {""}
        ):
            continue
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(name)
        for text in installed(name).requires or []:
            waiting.append((Requirement(text), frozenset({"", *requirement.extras})))
    return found


def licence_of(name: str) -> str:
    """An SPDX expression where the package has one, else its classifiers, else its own words."""
    metadata = installed(name).metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    prefix = "License :: OSI Approved :: "
    classified = [
        line.removeprefix(prefix)
        for line in metadata.get_all("Classifier") or []
        if line.startswith(prefix)
    ]
    if classified:
        return ", ".join(classified)
    words = metadata["License"].strip().splitlines() if "License" in metadata else []
    if not words:
        raise Unknown(f"{name} names no licence")
    return words[0]


def packages() -> list[Package]:
    parts: dict[str, set[str]] = {}
    for part, requirements in declared().items():
        for name in closure(requirements):
            parts.setdefault(name, set()).add(part)
    return [
        Package(name, licence_of(name), frozenset({"base"} if "base" in needed else needed))
        for name, needed in sorted(parts.items())
    ]


def text() -> str:
    rows = [
        f"| {package.name} | {package.licence} | {', '.join(sorted(package.parts))} |\n"
        for package in packages()
    ]
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
