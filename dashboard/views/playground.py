"""The page Playground."""

from dashboard import parts

parts.title("Playground", "What does a marked prompt read and write?")
