"""Which of Streamlit's scripts every page will want: told to the browser with the document.

Streamlit loads the script of an element once the element comes, then the scripts which that one
imports, and so on: round trips one after the other, while nothing is shown.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import streamlit

FOLDER = Path(streamlit.__file__).parent / "static" / "static" / "js"
# What cards, charts, tables, filters and words are drawn by, as Streamlit's build names it.
WANTED = (
    "Html",
    "StreamlitMarkdown",
    "remark-emoji",
    "ButtonGroup",
    "Selectbox",
    "Metric",
    "ArrowVegaLiteChart",
    "embed",
    "vega-interpreter",
    "DataFrame",
    "DownloadButton",
)
_IMPORT = re.compile(r"""(?:from|import)\s*["'`]\./([\w.-]+\.js)["'`]""")


@cache
def links() -> str:
    """As HTML; nothing for what another version of Streamlit has no script for."""
    return "".join(f'<link rel="modulepreload" href="./static/js/{name}">' for name in scripts())


def scripts() -> list[str]:
    """The files of `WANTED`, and those that they import, however deep."""
    found: dict[str, None] = {}
    waiting = [path.name for name in WANTED for path in sorted(FOLDER.glob(f"{name}.*.js"))]
    while waiting:
        name = waiting.pop(0)
        if name not in found and (FOLDER / name).is_file():
            found[name] = None
            waiting += _imports(name)
    return list(found)


def _imports(name: str) -> Iterator[str]:
    """What a script can't run without; what it asks for later, `import(…)`, is left for later."""
    return (match[1] for match in _IMPORT.finditer((FOLDER / name).read_text("utf-8")))
