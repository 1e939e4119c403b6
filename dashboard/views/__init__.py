"""The list of pages. A new page is a line here and a file in this folder. Pure."""

from dataclasses import dataclass

EVERY_FILTER = frozenset({"range", "workspace", "engine", "model"})


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A page."""

    # The name in the URL, and of the file that draws the page.
    name: str
    title: str
    # The filters that the page has.
    filters: frozenset[str] = EVERY_FILTER
    # Whether the page shows what all workspaces share. A workspace's own key may not see that.
    is_shared: bool = False


# The first section has no heading. Streamlit puts it above the others.
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
