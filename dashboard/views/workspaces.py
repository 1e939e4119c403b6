"""The page Workspaces."""

from dashboard import parts

parts.title("Workspaces", "Who uses the cache, how well, and within which limits?")
