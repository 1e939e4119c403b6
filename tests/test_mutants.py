"""The seeded bugs are still bugs of this tree: every patch has its header and applies.

Whether the tests notice them takes minutes: `scripts/long_tests mutants`.
"""

from tests.faults import mutants


def test_every_patch_has_its_header_and_applies() -> None:
    patches = mutants.all_mutants()
    kinds = [mutant.kind for mutant in patches]
    inside_vllm = mutants.all_mutants(mutants.PATCHES / "vllm")
    assert len(inside_vllm) >= 4
    assert kinds.count("T2") >= 12 and kinds.count("stranger") >= 3
    with mutants.copied_tree() as tree:
        for mutant in [*patches, *inside_vllm]:
            mutants.apply_patch(mutant, tree, check=True)
            for node in mutant.tests:
                assert (tree / node.partition("::")[0]).exists(), f"{mutant.name}: no {node}"
