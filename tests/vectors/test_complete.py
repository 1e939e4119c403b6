"""Every numbered vector of the spec has a test: here, or where `ELSEWHERE` says."""

import re
from pathlib import Path

from tests.vectors.test_counts import VECTORS

ROOT = Path(__file__).resolve().parents[2]

NUMBERS = """
V01 V02 V03 V04 V05 V06 V07 V08 V09 V10 V11 V12 V13 V14 V14b V15 V16 V17 V18 V19
V20a V20b V20c V20d V20e V20f V20g V21 V22 V23 V24 V25 V26 V27 V28 V29
V30 V31 V32 V33 V34 V35 V36 V37 V38 V39 V40 V41 V42 V43 V44 V45 V46 V47 V48 V49
V50 V51 V52 V53 V54 V55 V56 V57 V58 V60 V61 V62 V63 V64 V65 V66 V67 V68
V70 V71 V72 V73 V74 V75 V76 V77 V78 V79 V80 V81 V82 V83 V84 V85
V90 V91 V92 V93 V94 V95 V96 V97 V98 V99 V100
V110 V111 V112 V113 V114 V115 V116 V117 V118 V119 V120 V121 V122 V123 V124 V125 V126 V127 V128
V129 V130
""".split()

ELSEWHERE = {
    # Held on every response of every vector.
    "V38": "tests/vectors/world.py::counts",
    "V48": "tests/vectors/test_counts.py::V39",  # the spec: "V39 (= V48)"
    # No valid body has no target.
    "V58": "tests/gateway/prompt/test_breakpoints.py::"
    "test_no_eligible_slot_means_no_breakpoint_and_no_error_v58",
    "V114": "tests/gateway/turn/test_diagnostics.py::"
    "test_without_the_object_and_on_a_first_turn_there_is_none_v114",
    "V115": "tests/gateway/turn/test_diagnostics.py::test_growth_is_no_divergence_v115",
    "V116": "tests/gateway/turn/test_diagnostics.py::"
    "test_the_earliest_change_is_named_with_what_it_cost_v116",
    "V117": "tests/gateway/turn/test_diagnostics.py::"
    "test_what_cannot_be_compared_with_is_not_found_v117",
    "V118": "tests/gateway/turn/test_diagnostics.py::test_only_other_parameters_differ_v118",
    "V119": "tests/gateway/turn/test_diagnostics.py::V119",
    **{f"V{n}": f"tests/gateway/prices/test_prices.py::V{n}" for n in range(120, 126)},
}


def test_every_vector_has_a_test() -> None:
    tests = re.findall(r"def (test_\w+)", (Path(__file__).parent / "test_flows.py").read_text())
    here = {f"V{number}" for name in tests for number in re.findall(r"_v(\d+\w?)(?=_|$)", name)}
    here |= {number.split("-")[0] for number in VECTORS}
    here |= {part for number in VECTORS for part in number.split("-") if part.startswith("V")}
    assert set(NUMBERS) - here - set(ELSEWHERE) == set()
    assert here <= set(NUMBERS) and not here & set(ELSEWHERE)


def test_the_tests_elsewhere_are_there() -> None:
    for number, test in ELSEWHERE.items():
        path, name = test.split("::")
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), number
