"""The list of licences has every package that is installed with the gateway."""

import re

from scripts.docs import licences


def test_every_package_of_the_base_extras_is_listed_with_its_licence() -> None:
    declared = licences.declared()
    needed = licences.closure([*declared["base"], *declared["gateway"], *declared["postgres"]])
    listed = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| ", licences.FILE.read_text(), re.M))
    assert needed <= set(listed), "run .venv/bin/python -m scripts.docs.licences"
    assert len(needed) > 20 and all(licences.licence_of(name) == listed[name] for name in needed)


def test_direct_dependencies_of_every_extra_are_listed() -> None:
    listed = set(re.findall(r"^\| ([a-z0-9-]+) \|", licences.FILE.read_text(), re.M))
    for requirements in licences.declared().values():
        names = {
            licences.canonicalize_name(licences.Requirement(text).name) for text in requirements
        }
        assert names <= listed, "run .venv/bin/python -m scripts.docs.licences"
