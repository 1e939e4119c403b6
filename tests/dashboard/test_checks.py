"""What the checks of a drawn page catch, in a real browser: charts as they once were, and worse."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.docs.page_matrix import CHECKS
from scripts.setup.chromium import browsing, find_chromium
from scripts.stack import free_port, python, serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium"),
]
SCRIPT = """
import altair as alt, pandas as pd, streamlit as st
kind = st.query_params.get("kind", "good")
rows = pd.DataFrame({"x": [0, 5], "end": [5, 9], "y": [1, 2], "c": ["a", "b"]})
bar = alt.Chart(rows).mark_bar(size=20).encode(
    x=alt.X("x:Q", title="Tokens", scale=alt.Scale(domain=[0, 9])), x2="end:Q", color="c:N")
charts = {
    "good": bar,
    "no height": alt.Chart(rows).mark_rect(cornerRadius=2).encode(
        x=alt.X("x:Q", title="Tokens"), x2="end:Q",
        y=alt.value(0), y2=alt.value("height"), color="c:N"),
    "empty": alt.Chart(rows[:0]).mark_bar().encode(
        x=alt.X("x:Q", title="Tokens", scale=alt.Scale(domain=[0, 9])), x2="end:Q"),
    "nan": alt.Chart(rows).mark_bar().encode(
        x=alt.X("x:Q", title="Tokens", axis=alt.Axis(labelExpr="'NaN'")), x2="end:Q"),
    "power": alt.Chart(rows).mark_bar().encode(
        x=alt.X("x:Q", title="Tokens", axis=alt.Axis(format=".0e")), x2="end:Q"),
    "twice": alt.Chart(rows).mark_bar().encode(
        x=alt.X("x:Q", title="Tokens", axis=alt.Axis(format=".0f", values=[1, 1.2, 3])),
        x2="end:Q"),
    "unlabelled": alt.Chart(rows).mark_bar().encode(
        x=alt.X("x:Q", title="Tokens", axis=alt.Axis(values=[])), x2="end:Q"),
}
st.title("Checks")
if kind == "narrow card":
    with st.container(width=120):
        st.metric("Time", "1 s", "send it again to compare", border=True)
st.altair_chart(charts.get(kind, bar))
"""
WRONG = {
    "no height": "a mark without a size",
    "empty": "a chart without a mark",
    "nan": "a label that is no number: NaN",
    "power": "a label that is no number",
    "twice": "an axis that repeats a label: 1",
    "unlabelled": "an axis without labels: Tokens",
    "narrow card": 'clipped: "send it again to compare"',
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    script, port = folder / "checks.py", free_port()
    script.write_text(SCRIPT, "utf-8")
    options = ["--server.port", str(port), "--server.headless", "true"]
    options += ["--browser.gatherUsageStats", "false", "--server.address", "127.0.0.1"]
    command = [*python("streamlit"), "run", str(script), *options]
    with serving(command, {}, port, ready="/_stcore/health", quiet=True) as server:
        yield server.wait().url


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with served(tmp_path_factory.mktemp("checks")) as url, browsing() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 800})

        def problems(kind: str) -> list[str]:
            page.goto(f"{url}/?kind={kind}")
            page.wait_for_selector("[data-testid=stVegaLiteChart] svg", timeout=120_000)
            page.wait_for_timeout(1500)
            found: list[str] = page.evaluate(CHECKS)
            return found

        yield problems


def test_a_good_chart_has_none_of_these_problems(drawn: Any) -> None:
    found = drawn("good")
    assert not [line for line in found for said in WRONG.values() if said in line]


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_chart_is_caught(drawn: Any, kind: str) -> None:
    found = drawn(kind)
    assert any(WRONG[kind] in line for line in found), found
