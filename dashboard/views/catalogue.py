"""The list of pages. A new one is a line here and a file in `views/`. Pure."""

from dataclasses import dataclass

EVERY_FILTER = frozenset({"range", "workspace", "engine", "model"})


@dataclass(frozen=True, slots=True)
class Entry:
    """A page, the file that draws it, and the filters that it knows."""

    name: str
    title: str
    filters: frozenset[str] = EVERY_FILTER


# The first has no heading: Streamlit puts it above the others.
SECTIONS = {
    "": [Entry("overview", "Overview")],
    "Money": [
        Entry("savings", "Savings"),
        Entry("workspaces", "Workspaces"),
    ],
    "Cache": [
        Entry("prefixes", "Prefixes and leases"),
        Entry("memory", "Memory", frozenset({"engine"})),
        Entry("fleet", "Fleet", frozenset({"range", "engine", "model"})),
    ],
    "Requests": [
        Entry("latency", "Latency"),
        Entry("why", "Why did this miss"),
        Entry("requests", "Requests"),
        Entry("playground", "Playground", frozenset()),
    ],
}


def entries() -> list[Entry]:
    return [entry for found in SECTIONS.values() for entry in found]
