"""Which of Streamlit's scripts every page will want: told to the browser with the document.

Streamlit loads the script of an element when the element comes, then the scripts that it imports,
and so on: round trips one after the other, while nothing is shown. Streamlit's build says in
`static/manifest.json` which file an element is in and which files that one imports. It is the
manifest of Vite (https://vite.dev/guide/backend-integration).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import streamlit

FOLDER = Path(streamlit.__file__).parent / "static"
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


@cache
def links() -> str:
    """As HTML; nothing for an element that this version of Streamlit does not name."""
    return "".join(f'<link rel="modulepreload" href="./{file}">' for file in scripts(manifest()))


def manifest() -> dict[str, Any]:
    """Streamlit's chunks by key; none where a version ships no manifest."""
    try:
        found: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def scripts(chunks: dict[str, Any]) -> list[str]:
    """The files of `WANTED` and those that they import, directly or not.

    A chunk's `dynamicImports` are left out: they are asked for when somebody edits or exports.
    """
    waiting = [key for name in WANTED for key, chunk in chunks.items() if chunk.get("name") == name]
    found: dict[str, None] = {}
    seen: set[str] = set()
    while waiting:
        key = waiting.pop(0)
        if key not in seen and key in chunks:
            seen.add(key)
            found[chunks[key]["file"]] = None
            waiting += chunks[key].get("imports", [])
    return [file for file in found if file.endswith(".js")]
