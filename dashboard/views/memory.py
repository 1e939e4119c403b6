"""The page Memory."""

from dashboard import parts

parts.title("Memory", "What fills the engines' memory?")
