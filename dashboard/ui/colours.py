"""What each colour means, on every page. Pure.

Neighbours in a stack differ in lightness too, for readers with a colour vision deficiency.
"""

from typing import Literal

Theme = Literal["light", "dark"]
Palette = dict[str, str]

TOKENS: dict[Theme, Palette] = {
    "light": {
        "Read from cache": "#0f766e",
        "Written, 5 minutes": "#d97706",
        "Written, 30 minutes": "#b45309",
        "Written, 1 hour": "#9a3412",
        "Automatically reused": "#a8c3c8",
        "Uncached": "#64748b",
    },
    "dark": {
        "Read from cache": "#2dd4bf",
        "Written, 5 minutes": "#fbbf24",
        "Written, 30 minutes": "#fb923c",
        "Written, 1 hour": "#f97316",
        "Automatically reused": "#4d6b73",
        "Uncached": "#8595a8",
    },
}
BLOCKS: dict[Theme, Palette] = {
    "light": {
        "Active": "#2563eb",
        "Leased": "#0f766e",
        "Shared": "#7c3aed",
        "Best effort": "#7dc4b8",
        "Cached": "#94a3b8",
        "Free": "#e2e8f0",
    },
    "dark": {
        "Active": "#60a5fa",
        "Leased": "#2dd4bf",
        "Shared": "#a78bfa",
        "Best effort": "#1d6f66",
        "Cached": "#64748b",
        "Free": "#263240",
    },
}
HITS: dict[Theme, Palette] = {
    "light": {"Hit": "#0f766e", "Miss": "#b45309"},
    "dark": {"Hit": "#2dd4bf", "Miss": "#fbbf24"},
}
# Where a hit was lost on its way.
STAGES: dict[Theme, Palette] = {
    "light": {"Available": "#94a3b8", "Captured": "#2563eb", "Delivered": "#0f766e"},
    "dark": {"Available": "#64748b", "Captured": "#60a5fa", "Delivered": "#2dd4bf"},
}
# What was paid, what was saved, what was lost.
MONEY: dict[Theme, Palette] = {
    "light": {"Cost": "#475569", "Saved": "#0f766e", "Lost": "#b42318"},
    "dark": {"Cost": "#94a3b8", "Saved": "#2dd4bf", "Lost": "#ff8a7a"},
}
# What a plan read, what it reused in all, and what one memory without leases would have.
PLANS: dict[Theme, Palette] = {
    "light": {
        "LRU, no leases (exact)": "#64748b",
        "Read (simulated)": "#0f766e",
        "Reused (simulated)": "#b45309",
    },
    "dark": {
        "LRU, no leases (exact)": "#94a3b8",
        "Read (simulated)": "#2dd4bf",
        "Reused (simulated)": "#fbbf24",
    },
}
WAITS: dict[Theme, Palette] = {
    "light": {"p50": "#0f766e", "p95": "#b45309"},
    "dark": {"p50": "#2dd4bf", "p95": "#fbbf24"},
}
# Marks without a meaning of their own.
PLAIN: dict[Theme, str] = {"light": "#2563eb", "dark": "#60a5fa"}
TEXT: dict[Theme, str] = {"light": "#17212b", "dark": "#e6edf3"}
SOFT_TEXT: dict[Theme, str] = {"light": "#4a5866", "dark": "#a9b7c4"}
GRID: dict[Theme, str] = {"light": "#dfe4ea", "dark": "#2a3642"}
