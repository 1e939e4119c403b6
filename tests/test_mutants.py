"""The seeded bugs are still bugs of this tree: every patch has its header and applies.

Whether the tests notice them takes minutes: `scripts/long_tests mutants`.
"""

from pathlib import Path
from types import ModuleType

import pytest

from tests.faults import mutants as scripts_mutants

ROOT = Path(__file__).resolve().parent.parent
HEADER = "Bug: b\nUser: u\nTests: tests\nKind: T2\n"


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    return scripts_mutants


def test_every_patch_has_its_header_and_applies(mutants: ModuleType) -> None:
    found = mutants.all_mutants()
    kinds = [mutant.kind for mutant in found]
    inside_vllm = mutants.all_mutants(mutants.PATCHES / "vllm")
    assert len(inside_vllm) >= 4
    assert kinds.count("T2") >= 12 and kinds.count("stranger") >= 3
    with mutants.copied_tree() as tree:
        for mutant in [*found, *inside_vllm]:
            mutants.apply_patch(mutant, tree, check=True)
            for node in mutant.tests:
                assert (tree / node.partition("::")[0]).exists(), f"{mutant.name}: no {node}"


def test_a_patch_that_does_not_fit_is_refused(mutants: ModuleType, tmp_path: Path) -> None:
    stale = tmp_path / "00-stale.patch"
    stale.write_text(
        HEADER + "\n--- a/engine/clock.py\n+++ b/engine/clock.py\n@@ -1,1 +1,1 @@\n-gone\n+new\n"
    )
    mutant = mutants.read_mutant(stale)
    with mutants.copied_tree() as tree, pytest.raises(mutants.BadMutant, match="does not apply"):
        mutants.apply_patch(mutant, tree)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Bug: b\n", ""),
        ("User: u", "User:"),
        ("Kind: T2", "Kind: other"),
        ("Tests: tests", "Tests: tests\nTests: tests"),
        ("Bug: b", "Bug: b\nwithout a name"),
    ],
)
def test_a_header_that_is_not_whole_is_refused(
    mutants: ModuleType, tmp_path: Path, old: str, new: str
) -> None:
    patch = tmp_path / "00-header.patch"
    patch.write_text(HEADER.replace(old, new) + "\n--- a/x\n+++ b/x\n")
    with pytest.raises(mutants.BadMutant):
        mutants.read_mutant(patch)
