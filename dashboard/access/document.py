"""The document of every page: Streamlit's own, with the address of its server and preload links.

Without the address, a page that is opened as `/savings` asks for `/savings/_stcore/health`, and the
browser logs an error. Preload links save round trips. They also load all scripts at once, so a page
whose session ends later asks for no script that it would be refused. Vite's manifest in Streamlit's
build (https://vite.dev/guide/backend-integration) names the scripts.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import streamlit
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route

FOLDER = Path(streamlit.__file__).parent / "static"
# The parts that draw pages, by their names in Streamlit's build. Code (1.5 MB) and the calendar are
# left out: the pages that show them ask for them.
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
    "Button",
    "LinkButton",
    "PageLink",
    "Checkbox",
    "TextInput",
    "TextArea",
    "NumberInput",
    "Progress",
    "Spinner",
    "Toast",
)
_BASE = "<script>window.__streamlit={BACKEND_BASE_URL:location.origin+'/'}</script>"
# After a restart the server answers 401 to a page that was open, because it knows no session. This
# script then loads the page again, which leads to the sign-in. Without the script Streamlit shows
# the status in a dialog, and asks for ever.
_SIGNED_OUT = """<script>{
const ask = window.fetch;
window.fetch = async (...asked) => {
  const reply = await ask(...asked);
  if (reply.status === 401 && new URL(reply.url).origin === location.origin) location.reload();
  return reply;
};
}</script>"""


@cache
def document() -> str:
    """Streamlit's document with our title, the two scripts, and the preload links."""
    text = (FOLDER / "index.html").read_text("utf-8")
    text = text.replace("<title>Streamlit</title>", "<title>Holdfast</title>")
    links = (f'<link rel="modulepreload" href="./{file}">' for file in scripts(manifest()))
    text = text.replace("<head>", f"<head>{_BASE}{_SIGNED_OUT}", 1)
    return text.replace("</head>", f"{''.join(links)}</head>", 1)


def manifest() -> dict[str, Any]:
    """Streamlit's chunks by key. There are none if Streamlit's version ships no manifest."""
    try:
        manifest: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest


def scripts(chunks: dict[str, Any]) -> list[str]:
    """The files of the chunks in `WANTED`, and of all chunks that these import, directly or not. A
    chunk's `dynamicImports` are left out: a page asks for them when somebody edits or exports."""
    keys = {chunk.get("name"): key for key, chunk in chunks.items()}
    waiting = [keys[name] for name in WANTED if name in keys]
    files: dict[str, str] = {}
    while waiting:
        key = waiting.pop(0)
        if key not in files and key in chunks:
            files[key] = chunks[key]["file"]
            waiting += chunks[key].get("imports", [])
    return [file for file in files.values() if file.endswith(".js")]


async def _show(request: Request) -> HTMLResponse:
    return HTMLResponse(document(), headers={"cache-control": "no-store"})


async def _start(request: Request) -> RedirectResponse:
    """Lead to `/`, because the first page has no address of its own in Streamlit."""
    query = request.url.query
    return RedirectResponse(f"/?{query}" if query else "/", 307)


def routes(first: str, others: list[str]) -> list[Route]:
    """The routes of the start, of the first page, and of each other page."""
    routes = [Route(f"/{name}", _show, methods=["GET"]) for name in ("", *others)]
    return [*routes, Route(f"/{first}", _start, methods=["GET"])]
