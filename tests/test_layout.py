"""The tree's own rules: who imports whom, how long things get, what documentation follows."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from gateway.ledger.schema import REVISION
from scripts.docs import settings as settings_docs

ROOT = Path(__file__).resolve().parent.parent
# A file is one idea, mostly under 700 lines.
MAX_FILE_LINES = 900
# The oracle is kept as its authors wrote it.
VENDORED = {"tests/conformance/oracle.py"}
MAX_SHELL_LINES = 60
MAX_FUNCTION_LINES = 80
# The frozen revision stays as it is.
STILL_LONG = {
    "migrations/versions/0001_schema.py: _create_rollups",
}
SKIPPED_FOLDERS = {".git", ".venv", "data", "build", "dist", "node_modules", "__pycache__"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".example", ".jinja", ""}

# One outside library, one home.
HOMES = {
    "torch": ("engine/compute/", "scripts/", "tests/"),
    # engine.text reads vocabularies beside tokenizer.json with its converters.
    "transformers": ("engine/compute/", "engine/text/files.py", "scripts/", "tests/"),
    "sqlalchemy": ("gateway/ledger/", "migrations/", "tests/"),
    "streamlit": ("dashboard/", "tests/dashboard/"),
    "litestar": (
        "gateway/app.py",
        "gateway/http/",
        "gateway/admin/",
        "engine/serve/",
        "scripts/bench/",
        "tests/",
    ),
    "prometheus_client": (
        "gateway/base/metrics.py",
        "engine/metrics.py",
        "tests/",
    ),
}
# The two edges of each process, where anything may arrive and must be answered or logged.
TOP = {
    *("CHANGELOG.md", "LICENSE", "README.md", "docker-compose.yml", "pyproject.toml"),
    *("dashboard", "engine", "gateway", "migrations"),
    *("requirements.lock", "scripts", "tests"),
}
BROAD_EXCEPT_ALLOWED = {
    # Inside a vLLM that others use: our errors must not be theirs.
    "engine/backends/vllm/core.py",
    "engine/backends/vllm/loop.py",
    "engine/backends/vllm/switch.py",
    "engine/schedule/loop.py",
    "engine/serve/health.py",
    "engine/supervisor.py",
    "engine/serve/server.py",
    "gateway/http/errors.py",
    "gateway/base/background.py",
    "scripts/gpu/__main__.py",  # a part that fails is a figure of the check
}


# "displaced" and a copied block are words of exact prompts.
APPROXIMATE_WORD = re.compile(
    r"approximat|compress|document|sibling|scorer|(?<!dis)plac(?:ed|ing)",
    re.IGNORECASE,
)


IMPORT = re.compile(
    r"^ *(?:from (?P<of>[\w.]+) import (?P<names>\([^)]*\)|[^\n]+)|import (?P<modules>[^\n(]+))",
    re.M,
)
GLOBAL = re.compile(r"^[ \t]+global \w", re.MULTILINE)
BROAD_EXCEPT = re.compile(r"^[ \t]*except(?: (?:Base)?Exception)?(?: as \w+)?:", re.MULTILINE)


def files() -> list[Path]:
    paths = []
    for folder, folders, names in os.walk(ROOT):
        # Hidden folders are caches of tools, except for those that belong to the tree.
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED_FOLDERS
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name in (".ci", ".streamlit"))
        ]
        # In a worktree `.git` is a file with a path in it, and the environment may be a link.
        paths += [Path(folder, name) for name in names if name not in SKIPPED_FOLDERS]
    return paths


def python_files() -> list[Path]:
    return [path for path in files() if path.suffix == ".py"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def sources() -> dict[str, str]:
    return {name_of(path): path.read_text("utf-8") for path in python_files()}


@cache
def imports() -> list[tuple[str, set[str]]]:
    """Of each file the full names of the modules that it imports, also inside functions."""
    return [(name, set(names_in(text))) for name, text in sources().items()]


def names_in(text: str) -> Iterator[str]:
    for statement in IMPORT.finditer(text):
        listed = re.sub(r"#[^\n]*", "", statement["modules"] or statement["names"]).strip(" \t()")
        names = [name.split()[0] for name in listed.split(",") if name.strip()]
        if statement["of"]:
            yield statement["of"]
            names = [f"{statement['of']}.{name}" for name in names]
        yield from names


def test_no_file_is_too_long() -> None:
    lengths = {name: len(text.splitlines()) for name, text in sources().items()}
    long = {name for name, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert long <= VENDORED


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """All of our files, parsed."""
    for name, text in sources().items():
        if name not in VENDORED:
            yield name, ast.parse(text)


def test_no_function_is_too_long() -> None:
    long = [
        f"{name}: {node.name}"
        for name, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert sorted(set(long) - STILL_LONG) == []


def test_a_statement_assigns_one_thing() -> None:
    """A tuple is assigned to a tuple only as a swap, or as a pair that is one thing: two
    expressions that differ in one name, which is the target's own (`x, y = point.x, point.y`)."""
    packed = [
        f"{name}:{node.lineno}"
        for name, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and not is_one_thing(node.targets[0].elts, node.value.elts)
    ]
    assert packed == []


def is_one_thing(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    names = [ast.unparse(target) for target in targets]
    if sorted(names) == sorted(map(ast.unparse, values)):
        return True
    if len(targets) != 2:
        return False
    words = [re.findall(r"\w+|\W", ast.unparse(value)) for value in values]
    if len(words[0]) != len(words[1]):
        return False
    differing = [pair for pair in zip(*words, strict=True) if pair[0] != pair[1]]
    parts = tuple(name.split(".")[-1].lstrip("_") for name in names)
    return len(words[0]) > 1 and differing == [parts]


@pytest.mark.parametrize(
    ("statement", "is_allowed"),
    [
        ("a, b = b, a", True),
        ("x, y = point.x, point.y", True),
        ("cos, sin = angles.cos().float(), angles.sin().float()", True),
        ("self.save, self.load = pool.save, pool.load", True),
        ("size, given = 1, []", False),
        ("left, right = point.x, point.y", False),
        ("x, y, z = point.x, point.y, point.z", False),
        ("a, b = c, d", False),
    ],
)
def test_what_one_thing_is(statement: str, is_allowed: bool) -> None:
    node = ast.parse(statement).body[0]
    assert isinstance(node, ast.Assign)
    assert isinstance(node.targets[0], ast.Tuple)
    assert isinstance(node.value, ast.Tuple)
    assert is_one_thing(node.targets[0].elts, node.value.elts) == is_allowed


def test_no_shared_count_is_read_before_an_await_and_written_behind_it() -> None:
    """`self.count -= await …` loads the count first, so what others added meanwhile is lost."""
    over_await = [
        f"{name}:{node.lineno}"
        for name, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign)
        and not isinstance(node.target, ast.Name)
        and any(isinstance(part, ast.Await) for part in ast.walk(node.value))
    ]
    assert over_await == []


def test_shell_scripts_are_short_and_strict() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]
    for path in [*scripts, ROOT / ".ci" / "run"]:
        text = path.read_text("utf-8")
        if "sh" not in text.splitlines()[0]:
            continue
        assert len(text.splitlines()) <= MAX_SHELL_LINES, path
        assert re.search(r"^set -eu", text, re.MULTILINE), path
        assert os.access(path, os.X_OK), path


def test_nothing_is_global() -> None:
    assert not [name for name, text in sources().items() if GLOBAL.search(text)]


def test_broad_excepts_are_at_the_process_edges_only() -> None:
    broad = {name for name, text in sources().items() if BROAD_EXCEPT.search(text)}
    assert {name for name in broad if not name.startswith("tests/")} <= BROAD_EXCEPT_ALLOWED


@pytest.mark.parametrize("library", sorted(HOMES))
def test_a_library_stays_at_home(library: str) -> None:
    strays = [
        name
        for name, modules in imports()
        if any(module.split(".")[0] == library for module in modules)
        and not name.startswith(HOMES[library])
    ]
    assert not strays


def test_the_layers_hold() -> None:
    lint = shutil.which("lint-imports", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if lint is None:
        pytest.skip("import-linter is not installed; scripts/check runs it")
    process = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gateway.app", ["torch", "transformers", "streamlit", "opentelemetry"]),
        ("engine.protocol", ["torch", "litestar"]),
        ("engine.serve.server", ["torch", "transformers", "sqlalchemy", "opentelemetry"]),
        ("dashboard.client", ["torch", "sqlalchemy", "litestar"]),
    ],
)
def test_an_import_brings_no_heavy_library(module: str, absent: list[str]) -> None:
    code = f"import {module}, sys; print(*[m for m in {absent!r} if m in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == ""


@pytest.mark.parametrize("room", ["engine/cache/", "engine/schedule/"])
def test_a_room_of_exact_prompts_has_no_word_of_approximate_ones(room: str) -> None:
    """The words of `engine/approximate`. To the rooms below it a chain has a kind, and a token's
    position may lie behind its slot."""
    modules = {name: text for name, text in sources().items() if name.startswith(room)}
    assert modules
    matches = [
        f"{name}: {match.group()}"
        for name, text in modules.items()
        for match in APPROXIMATE_WORD.finditer(text)
    ]
    assert matches == []


@pytest.mark.parametrize(
    "text",
    ["placed_from", "num_documents", "with_sibling", "Compressor", "is_approximate", "Placings"],
)
def test_a_word_of_approximate_prompts_is_known_in_a_name(text: str) -> None:
    assert APPROXIMATE_WORD.search(text)


def test_nothing_names_the_machine_it_was_written_on() -> None:
    # In pieces, so that this file does not find itself.
    places = ["/" + "root/", "/" + "work/", "/" + "home/", "/opt/" + "wheels", "/opt/" + "pypi"]
    pattern = re.compile("|".join(map(re.escape, places)))
    names = {
        name_of(path)
        for path in files()
        if path.suffix in TEXT_SUFFIXES
        and path.stat().st_size < 1_000_000
        and pattern.search(path.read_text("utf-8", errors="replace"))
    }
    assert not names


def test_env_example_lists_every_setting() -> None:
    assert (ROOT / ".env.example").read_text("utf-8") == settings_docs.env_example(), (
        "run .venv/bin/python -m scripts.docs.settings"
    )


@pytest.mark.parametrize("program", settings_docs.PROGRAMS)
def test_a_table_beside_the_settings_lists_every_setting(program: str) -> None:
    path = ROOT / settings_docs.PROGRAMS[program][2]
    assert path.read_text("utf-8") == settings_docs.page(program), (
        "run .venv/bin/python -m scripts.docs.settings"
    )


def test_every_variable_of_compose_is_a_setting_or_its_own() -> None:
    known = {row[0] for program in settings_docs.PROGRAMS for row in settings_docs.rows(program)}
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    used = set(re.findall(r"\b(?:HOLDFAST|ENGINE|DASHBOARD)_[A-Z_]+\b", text))
    # The gateway reads any of its settings from the file that NAME_FILE names.
    of_files = {f"{name}_FILE" for name in known if name.startswith("HOLDFAST_")}
    assert used <= known | of_files


def test_the_changelog_has_unreleased_on_top() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_nothing_else_stands_at_the_top() -> None:
    named = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if named.returncode:
        pytest.skip("the tree is no checkout")
    tops = {path.partition("/")[0] for path in named.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} == TOP


def test_revisions_are_one_chain_that_ends_with_the_schemas_own() -> None:
    """Looked at here, since every change runs this file: two changes may each have added one."""
    config = Config(toml_file=ROOT / "pyproject.toml")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    scripts = ScriptDirectory.from_config(config)
    chain = list(scripts.walk_revisions())
    assert [revision.revision for revision in chain][-1] == "0001"
    assert scripts.get_heads() == [REVISION], "gateway/ledger/schema.py names the newest one"
    files = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert {Path(revision.path).name for revision in chain} == files
    for newer, older in pairwise(chain):
        assert newer.down_revision == older.revision
