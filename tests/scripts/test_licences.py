"""The list of licences has every package that is installed with the gateway."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent


def licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "scripts" / "licences.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["licences"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_package_of_the_base_extras_is_listed_with_its_licence() -> None:
    module = licences()
    declared = module.declared()
    needed = module.closure([*declared["base"], *declared["gateway"], *declared["postgres"]])
    listed = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| ", module.FILE.read_text(), re.M))
    assert needed <= set(listed), "run .venv/bin/python scripts/licences.py"
    assert len(needed) > 20 and all(module.licence_of(name) == listed[name] for name in needed)


def test_direct_dependencies_of_every_extra_are_listed() -> None:
    module = licences()
    listed = set(re.findall(r"^\| ([a-z0-9-]+) \|", module.FILE.read_text(), re.M))
    for requirements in module.declared().values():
        names = {module.canonicalize_name(module.Requirement(text).name) for text in requirements}
        assert names <= listed, "run .venv/bin/python scripts/licences.py"
