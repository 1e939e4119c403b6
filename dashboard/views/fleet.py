"""The page Fleet."""

from dashboard import parts

parts.title("Fleet", "Are the engines well, and what did restarts cost?")
