"""requirements.lock pins what pyproject.toml asks for, and every package's licence is listed."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.docs import licences
from scripts.setup.install_needs import LOCK, ROOT, is_unhashed, read_lock, read_project
from scripts.setup.install_needs import requirements_of as wanted_by
from scripts.setup.lock import NEEDS


def pin_of(entry: str) -> Requirement:
    return Requirement(re.split(r"\s+\\", entry)[0])


@pytest.mark.parametrize("need", NEEDS)
def test_every_requirement_is_pinned_within_its_range_with_hashes(need: str) -> None:
    """It fails where pyproject.toml was changed and `python -m scripts.setup.lock` was not run."""
    pins: dict[str, list[str]] = {}
    for entry in read_lock()[need]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
        pin = pin_of(entry)
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        pins.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    for text in wanted_by(need, read_project()):
        wanted = Requirement(text)
        if not is_unhashed(text):
            versions = pins[canonicalize_name(wanted.name)]
            assert all(version in wanted.specifier for version in versions), text


@pytest.mark.parametrize("python", ["3.11.4", "3.12.0", "3.13.1", "3.14.0"])
def test_a_package_has_one_version_on_one_python(python: str) -> None:
    platform = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    pins = map(pin_of, {entry for need in NEEDS for entry in read_lock()[need]})
    names = [pin.name for pin in pins if not pin.marker or pin.marker.evaluate(dict(platform))]
    assert len(names) == len(set(names)) > 100


def test_the_lock_names_no_index_and_no_place() -> None:
    text = (ROOT / LOCK).read_text("utf-8")
    assert "://" not in text and "file:" not in text and " @ " not in text


def test_every_package_is_listed_with_its_licence() -> None:
    """All that are installed with the gateway, and the direct dependencies of every extra."""
    pattern = r"^- ([a-z0-9-]+): (.+?)(?: \([a-z, ]+\))?$"
    listed = dict(re.findall(pattern, licences.FILE.read_text(), re.M))
    parts = ("base", "gateway", "postgres")
    needed = {name for part in parts for name in licences.packages_of(part)}
    direct = {
        text for part in ("base", *licences.EXTRAS) for text in wanted_by(part, read_project())
    }
    names = {canonicalize_name(Requirement(text).name) for text in direct}
    assert needed | names <= set(listed), "run .venv/bin/python -m scripts.docs.licences"
    assert len(needed) > 20 and all(licences.licence_of(name) == listed[name] for name in needed)
