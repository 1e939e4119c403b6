"""The list of licences has every package that is installed with the gateway."""

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.docs import licences
from scripts.setup.install_needs import read_project, requirements_of


def test_every_package_of_the_base_extras_is_listed_with_its_licence() -> None:
    needed = {
        name for part in ("base", "gateway", "postgres") for name in licences.packages_of(part)
    }
    pattern = r"^- ([a-z0-9-]+): (.+?)(?: \([a-z, ]+\))?$"
    listed = dict(re.findall(pattern, licences.FILE.read_text(), re.M))
    assert needed <= set(listed), "run .venv/bin/python -m scripts.docs.licences"
    assert len(needed) > 20 and all(licences.licence_of(name) == listed[name] for name in needed)


def test_direct_dependencies_of_every_extra_are_listed() -> None:
    listed = set(re.findall(r"^- ([a-z0-9-]+): ", licences.FILE.read_text(), re.M))
    project = read_project()
    for part in ("base", *licences.EXTRAS):
        names = {
            canonicalize_name(Requirement(text).name) for text in requirements_of(part, project)
        }
        assert names <= listed, "run .venv/bin/python -m scripts.docs.licences"
