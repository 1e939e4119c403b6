"""The document of every page: Streamlit's own, with the address of its server and preload links.

Without the address, a page that is opened as `/savings` asks for `/savings/_stcore/health`, and the
browser logs an error. Preload links save round trips, and a page that is signed out meanwhile asks
for no script that it is refused. Vite's manifest in Streamlit's build
(https://vite.dev/guide/backend-integration) names the scripts.
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
# What pages are drawn by, as Streamlit's build names it. Code (1.5 MB) and the calendar are left
# out: the pages that show them ask for them.
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
# A restarted server has no session of a page that is open. The page is loaded again, which leads to
# the sign-in; without it Streamlit shows the status in a dialog, and asks for ever.
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
    text = (FOLDER / "index.html").read_text("utf-8")
    text = text.replace("<title>Streamlit</title>", "<title>Holdfast</title>")
    links = (f'<link rel="modulepreload" href="./{file}">' for file in scripts(manifest()))
    text = text.replace("<head>", f"<head>{_BASE}{_SIGNED_OUT}", 1)
    return text.replace("</head>", f"{''.join(links)}</head>", 1)


def manifest() -> dict[str, Any]:
    """Streamlit's chunks by key; none where a version ships no manifest."""
    try:
        manifest: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest


def scripts(chunks: dict[str, Any]) -> list[str]:
    """The files of `WANTED` and those that they import, directly or not. A chunk's `dynamicImports`
    are left out: they are asked for when somebody edits or exports."""
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
    """The first page has no address of its own in Streamlit."""
    query = request.url.query
    return RedirectResponse(f"/?{query}" if query else "/", 307)


def routes(first: str, others: list[str]) -> list[Route]:
    """The routes of the start, of the first page, and of each other page."""
    routes = [Route(f"/{name}", _show, methods=["GET"]) for name in ("", *others)]
    return [*routes, Route(f"/{first}", _start, methods=["GET"])]
