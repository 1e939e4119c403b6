"""Texts that make a pattern backtrack (CWE-1333), against each pattern of the tree."""

import ast
import re
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import pytest

Pattern = re.Pattern[Any]
ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("engine", "gateway", "dashboard")
RUN = ("dashboard.app",)
"""Modules that do their work when they are imported."""
OF_VLLM = "engine.backends.vllm."
"""Some import vLLM, which may not be there. They read no texts."""
# Read out of an operator's template while an engine starts, which has a deadline.
AT_THE_START = {"engine.text.formats.matching._PARTS", "engine.text.formats.matching._BORDERS"}
# Matched from a text's beginning alone.
ANCHORED = {"engine.text.tokens.pieces._MARKUP", "gateway.http.connections._HOST"}
KNOWN_AT_RUN = {
    # Of an adapter, in a process of its own.
    "engine/patterns.py: pattern",
    "engine/patterns.py: f'(.*\\\\.)?({pattern})$'",
    # Of a template, while an engine starts.
    "engine/text/call_styles.py: pattern",
    "engine/text/call_styles.py: f'{last_text}(\\\\s*){re.escape(behind)}'",
    # A run of one class of characters, up to a bound.
    "engine/text/formats/matching.py: f'{characters}{{0,{_MAX_WORD}}}'",
    # Alternatives that are plain words or digits.
    "engine/text/formats/table.py: f'(?:{self.controls.pattern})|(?P<name>{re.escape(self.name)})"
    "|(?P<digits>\\\\d+)|(?s:.)'",
    "engine/text/grammar.py: f\"({'|'.join(longest_first)})\"",
    "engine/text/formats/table.py: '|'.join(map(re.escape, words))",
    "engine/text/tokens/pieces.py: '|'.join(longest_first) or '(?!)'",
}
FLAGS_AT = {"re.compile": 1, "re.findall": 2, "re.finditer": 2, "re.fullmatch": 2, "re.match": 2,
            "re.search": 2, "re.split": 3, "re.sub": 4, "re.subn": 4}  # fmt: skip
"""Where the flags stand among a function's arguments."""
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


def compiled_in(module: ModuleType) -> dict[str, Pattern]:
    """What stands in its names, and in their dictionaries."""
    by_name: dict[str, Pattern] = {}
    for name, value in vars(module).items():
        members = value if isinstance(value, dict) else {"": value}
        for key, member in members.items():
            if isinstance(member, re.Pattern) and member not in by_name.values():
                by_name[f"{module.__name__}.{name}{key and f'[{key}]'}"] = member
    return by_name


def calls_in(source: Path) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The pattern and the flags of each call that takes one, wherever it stands."""
    code = source.read_text("utf-8")
    # Most files have none, and each process that collects tests reads them all.
    if not re.search(r"\bre\.|\bpattern\b", code):
        return
    for call in ast.walk(ast.parse(code)):
        if not isinstance(call, ast.Call):
            continue
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        function = ast.unparse(call.func)
        if function in FLAGS_AT and (call.args or "pattern" in named):
            at = FLAGS_AT[function]
            flags = call.args[at] if len(call.args) > at else named.get("flags")
            yield call.args[0] if call.args else named["pattern"], flags
        elif "pattern" in named:  # of a message's type
            yield named["pattern"], None


class Filled(ast.NodeTransformer):
    """A text whose places for escaped words have a letter."""

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        is_escaped = ast.unparse(node.value).startswith("re.escape(")
        return ast.Constant("x") if is_escaped else node


def written_in(source: Path, names: dict[str, Any]) -> dict[str, Pattern | None]:
    """The patterns of a file's calls by place and text; None for one that is known at run alone."""
    by_place: dict[str, Pattern | None] = {}
    for pattern, flags in calls_in(source):
        name = f"{source.relative_to(ROOT)}: {ast.unparse(pattern)}"
        code = ast.unparse(ast.fix_missing_locations(Filled().visit(pattern)))
        try:
            text = eval(code, dict(names))
            options = 0 if flags is None else eval(ast.unparse(flags), dict(names))
        except (NameError, AttributeError):
            by_place[name] = None
            continue
        if isinstance(text, str | bytes):
            by_place[name] = re.compile(text, options)
    return by_place


def patterns() -> dict[str, Pattern | None]:
    by_place: dict[str, Pattern | None] = {}
    imported = {}
    for module in modules():
        assert module.__file__ is not None
        imported[Path(module.__file__)] = vars(module)
        by_place |= compiled_in(module)
    compiled = {pattern for pattern in by_place.values() if pattern is not None}
    for source in chain.from_iterable((ROOT / name).rglob("*.py") for name in PACKAGES):
        if "build" in source.parts:
            continue  # what an installation of the plugin leaves behind
        for name, pattern in written_in(source, imported.get(source, {"re": re})).items():
            if pattern not in compiled:
                by_place[name] = pattern
    return by_place


PATTERNS = patterns()


def test_patterns_that_are_known_at_run_alone_are_these() -> None:
    """None is matched against a client's text but plain words."""
    assert {name for name, pattern in PATTERNS.items() if pattern is None} == KNOWN_AT_RUN


@pytest.mark.parametrize("name", sorted(PATTERNS.keys() - AT_THE_START - KNOWN_AT_RUN))
def test_no_text_makes_a_pattern_of_ours_backtrack(name: str) -> None:
    pattern = PATTERNS[name]
    assert pattern is not None
    for unit in [*UNITS.split(), " ", "\n", "\t", "a ", " \n", "20 ", "Jan ", "1 Jan", "Monday, "]:
        for end in ("", "!", "\0\n"):
            text = unit * (LENGTH // len(unit)) + end
            subject = text.encode() if isinstance(pattern.pattern, bytes) else text
            began = time.process_time()
            if name not in ANCHORED:
                for _ in pattern.finditer(subject):
                    pass
            pattern.match(subject)
            pattern.fullmatch(subject)
            assert time.process_time() - began < SECONDS, repr(unit)
