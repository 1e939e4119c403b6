"""Texts that make a pattern backtrack (CWE-1333), against each pattern of the tree."""

import re
import time
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType

import pytest

PACKAGES = ("engine", "gateway", "dashboard")
RUN = ("dashboard.app",)
"""Modules that do their work when they are imported."""
OF_VLLM = "engine.backends.vllm."
"""Some import vLLM, which may not be there. They read no texts."""
# Read out of an operator's template while an engine starts, which has a deadline.
AT_THE_START = {"engine.text.formats.matching._PARTS", "engine.text.formats.matching._BORDERS"}
# Matched from a text's beginning alone.
ANCHORED = {"engine.text.tokens.pieces._MARKUP", "gateway.http.connections._HOST"}
UNITS = r"""a A _ 1 { } [ ] < > / \ " ' - . : , = | « ‹ ` \" a, a. 1: 1- [a <a {" a=" «a 20 1.1
]{ <a> abcdef12- -abcd key_ tools[1 [1].a 12:34: {"type":"a", {"name":"a", <| <script> a\  word="""
LENGTH = 20_000
SECONDS = 0.5
"""Of the processor. A linear pattern takes a hundredth; a quadratic one seconds."""


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        for module in walk_packages(import_module(package).__path__, f"{package}."):
            if module.name in RUN or module.name.startswith(OF_VLLM):
                continue
            yield import_module(module.name)


def patterns() -> dict[str, re.Pattern[str] | re.Pattern[bytes]]:
    found: dict[str, re.Pattern[str] | re.Pattern[bytes]] = {}
    for module in modules():
        for name, value in vars(module).items():
            members = value if isinstance(value, dict) else {"": value}
            for key, member in members.items():
                if isinstance(member, re.Pattern) and member not in found.values():
                    found[f"{module.__name__}.{name}{key and f'[{key}]'}"] = member
    return found


PATTERNS = patterns()


@pytest.mark.parametrize("name", sorted(PATTERNS.keys() - AT_THE_START))
def test_no_text_makes_a_pattern_of_ours_backtrack(name: str) -> None:
    pattern = PATTERNS[name]
    for unit in [*UNITS.split(), " ", "\n", "\t", "a ", " \n", "20 ", "Jan ", "1 Jan", "Monday, "]:
        for end in ("", "!", "\0\n"):
            text = unit * (LENGTH // len(unit)) + end
            written = text.encode() if isinstance(pattern.pattern, bytes) else text
            began = time.process_time()
            if name not in ANCHORED:
                for _ in pattern.finditer(written):  # type: ignore[arg-type]
                    pass
            pattern.match(written)  # type: ignore[call-overload]
            pattern.fullmatch(written)  # type: ignore[call-overload]
            assert time.process_time() - began < SECONDS, repr(unit)
