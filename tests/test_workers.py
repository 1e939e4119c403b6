"""How the tests are shared out among processes: what is named there is in the tree."""

import ast
from pathlib import Path

from tests.workers import LONG, SHARING, SHARING_FILES, unit

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_named_is_there() -> None:
    assert [path for path in (*SHARING, *SHARING_FILES, *LONG) if not (ROOT / path).exists()] == []


def test_files_that_share_servers_are_one_unit_and_others_their_own() -> None:
    native = {unit(f"{file}::test_it[a::b]") for file in SHARING_FILES}
    assert native == {"tests/e2e/conftest.py"}
    assert unit("tests/conformance/test_a.py::test_it") == unit("tests/conformance/test_b.py::test")
    assert unit("tests/gateway/http/test_http.py::test_it[x]") == "tests/gateway/http/test_http.py"


def test_who_asks_for_the_shared_servers_of_e2e_is_in_their_unit() -> None:
    """Else its process would start an engine of its own for it."""
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests" / "e2e").glob("test_*.py")
        if uses_the_folders_servers(ast.parse(path.read_text("utf-8")))
    }
    assert asking == set(SHARING_FILES)


def uses_the_folders_servers(module: ast.Module) -> bool:
    """Whether a test takes a fixture of the folder that its file does not make itself."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    made = {function.name for function in functions}
    tests = [function for function in functions if function.name.startswith("test_")]
    taken = {argument.arg for test in tests for argument in test.args.args}
    return bool((taken & {"stack", "synthetic", "client"}) - made)
