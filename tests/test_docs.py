"""What the Markdown pages name is there: links, anchors, files, programs."""

import re
import subprocess
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
OURS = ("dashboard", "engine", "gateway", "migrations", "scripts", "tests")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^(```+)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
MODULE = re.compile(r"python(?:3)? -m ([a-zA-Z_][\w.]*)")
PATH = re.compile(rf"(?<![\w./$-])(?:{'|'.join(OURS)})/[\w./-]*\w")
FOLDER = re.compile(r"(?:[\w-]+/)+")
# Prefixes of models' names, which end like a folder.
OUTSIDE = {"anthropic/", "openai/"}
FILE = re.compile(r"[\w./-]*\w\.(?:py|toml|js|jinja|html|ini)")


@cache
def tracked() -> frozenset[str]:
    """Paths of all files that are, or are about to be, in the tree."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return frozenset(name for name in listed.splitlines() if (ROOT / name).exists())


def pages() -> list[str]:
    return sorted(name for name in tracked() if name.endswith(".md"))


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def prose_of(page: str) -> str:
    return FENCE.sub("", text_of(page))


def code_of(page: str) -> list[str]:
    """Every span and every block of code."""
    blocks = [block for _, block in FENCE.findall(text_of(page))]
    return [*blocks, *CODE.findall(prose_of(page))]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    names: set[str] = set()
    counts = Counter[str]()
    for heading in HEADING.findall(prose_of(page)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return names


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_to_something(page: str) -> None:
    for link in (first or second for first, second in LINK.findall(prose_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if anchor:
            name = target.resolve().relative_to(ROOT).as_posix()
            assert anchor in anchors(name), f"{page} links to {link}"


@pytest.mark.parametrize("page", pages())
def test_every_program_that_is_named_is_there(page: str) -> None:
    for module in (name for code in code_of(page) for name in MODULE.findall(code)):
        path = module.replace(".", "/")
        if module.partition(".")[0] in OURS:
            assert {f"{path}.py", f"{path}/__main__.py"} & tracked(), f"{page}: python -m {module}"
        else:
            assert find_spec(module.partition(".")[0]), f"{page}: python -m {module}"


@pytest.mark.parametrize("page", pages())
def test_every_path_that_is_named_is_there(page: str) -> None:
    for path in (name for code in code_of(page) for name in PATH.findall(code)):
        assert is_there(path), f"{page}: {path}"


@pytest.mark.parametrize("page", pages())
def test_every_file_that_is_named_is_below_the_page(page: str) -> None:
    """A name without its folder, or with the last of them: in the page's folder or below it."""
    folder = page.rpartition("/")[0]
    for code in CODE.findall(prose_of(page)):
        if not FILE.fullmatch(code) or code.partition("/")[0] in OURS:
            continue
        below = [name for name in tracked() if name.startswith(folder) or name == code]
        assert any(f"/{name}".endswith(f"/{code}") for name in below), f"{page}: {code}"


@pytest.mark.parametrize("page", pages())
def test_every_folder_that_is_named_is_below_the_page(page: str) -> None:
    folder = page.rpartition("/")[0]
    for code in CODE.findall(prose_of(page)):
        if not FOLDER.fullmatch(code) or code in OUTSIDE or is_there(code.rstrip("/")):
            continue
        below = [f"/{name}" for name in tracked() if name.startswith(folder)]
        assert any(f"/{code}" in name for name in below), f"{page}: {code}"


def is_there(path: str) -> bool:
    """A file or folder, or the beginning of files' names."""
    return any(f"{name}/".startswith(f"{path}/") for name in tracked())


def test_the_page_names_every_command_of_the_gateway() -> None:
    page = (ROOT / "gateway" / "README.md").read_text("utf-8")
    [names] = re.findall(r"^python -m gateway --help +# (.+)$", page, re.M)
    assert set(names.split(", ")) == COMMANDS.keys()
