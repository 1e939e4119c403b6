"""The document of every page: Streamlit's own, with the address of its server and preload links.

Without the address, a page that is opened as `/savings` asks for `/savings/_stcore/health`, and the
browser logs an error.
"""

import re
from functools import cache
from pathlib import Path

import streamlit
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route

from dashboard.access.preload import links

INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_BASE = "<script>window.__streamlit={BACKEND_BASE_URL:location.origin+'/'}</script>"


@cache
def document() -> str:
    index = Path(streamlit.__file__).parent / "static" / "index.html"
    text = index.read_text("utf-8").replace("<title>Streamlit</title>", "<title>Holdfast</title>")
    return text.replace("<head>", f"<head>{_BASE}", 1).replace("</head>", f"{links()}</head>", 1)


async def show(request: Request) -> HTMLResponse:
    return HTMLResponse(document(), headers={"cache-control": "no-store"})


async def start(request: Request) -> RedirectResponse:
    """The first page has no address of its own in Streamlit."""
    query = request.url.query
    return RedirectResponse(f"/?{query}" if query else "/", 307)


def routes(first: str, others: list[str]) -> list[Route]:
    """The routes of the start, of the first page, and of each other page."""
    shown = [Route(f"/{name}", show, methods=["GET"]) for name in ("", *others)]
    return [*shown, Route(f"/{first}", start, methods=["GET"])]
