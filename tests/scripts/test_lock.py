"""requirements.lock pins what pyproject.toml asks for, with hashes, and names no origin."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.setup.install_needs import LOCK, ROOT, is_unhashed, read_lock, read_project
from scripts.setup.install_needs import requirements_of as wanted_by
from scripts.setup.lock import NEEDS

every_need = pytest.mark.parametrize("need", NEEDS)


def pins_of(need: str) -> dict[str, list[str]]:
    """By name, the versions that are installed on one platform or another."""
    found: dict[str, list[str]] = {}
    for entry in read_lock()[need]:
        pin = Requirement(re.split(r"\s+\\", entry)[0])
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        found.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    return found


@every_need
def test_every_requirement_is_pinned_within_its_range(need: str) -> None:
    """It fails where pyproject.toml was changed and `python -m scripts.setup.lock` was not run."""
    pins = pins_of(need)
    for text in wanted_by(need, read_project()):
        wanted = Requirement(text)
        if not is_unhashed(text):
            versions = pins[canonicalize_name(wanted.name)]
            assert all(version in wanted.specifier for version in versions), text


@every_need
def test_every_package_has_hashes(need: str) -> None:
    for entry in read_lock()[need]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


@pytest.mark.parametrize("python", ["3.11.4", "3.12.0", "3.13.1", "3.14.0"])
def test_a_package_has_one_version_on_one_python(python: str) -> None:
    platform = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    entries = {entry for need in NEEDS for entry in read_lock()[need]}
    pins = [Requirement(re.split(r"\s+\\", entry)[0]) for entry in entries]
    names = [pin.name for pin in pins if not pin.marker or pin.marker.evaluate(dict(platform))]
    assert len(names) == len(set(names)) > 100


def test_the_lock_names_no_index_and_no_place() -> None:
    text = (ROOT / LOCK).read_text("utf-8")
    assert "://" not in text and "file:" not in text and " @ " not in text
