"""The list of pages. A new one is a line here and a file beside it. Pure."""

from dataclasses import dataclass

EVERY_FILTER = frozenset({"range", "workspace", "engine", "model"})


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A page, the file that draws it, and the filters that it knows."""

    name: str
    title: str
    filters: frozenset[str] = EVERY_FILTER
    is_shared: bool = False
    """Whether it shows what all workspaces share, which a workspace's own key may not see."""


# The first has no heading: Streamlit puts it above the others.
SECTIONS = {
    "": [PageEntry("overview", "Overview")],
    "Money": [
        PageEntry("savings", "Savings"),
        PageEntry("workspaces", "Workspaces", EVERY_FILTER - {"engine"}),
    ],
    "Cache": [
        PageEntry("prefixes", "Prefixes and leases", frozenset({"workspace", "engine"})),
        PageEntry("memory", "Memory", frozenset({"engine"}), is_shared=True),
        PageEntry("fleet", "Fleet", frozenset({"range", "engine", "model"}), is_shared=True),
        PageEntry("plan", "Plan", frozenset({"range", "workspace", "model"})),
    ],
    "Requests": [
        PageEntry("latency", "Latency"),
        PageEntry("why", "Why did this miss"),
        PageEntry("advice", "Advice", frozenset({"range", "workspace", "model"})),
        PageEntry("requests", "Requests"),
        PageEntry("playground", "Playground", frozenset()),
    ],
}


def entries() -> list[PageEntry]:
    return [entry for section in SECTIONS.values() for entry in section]
