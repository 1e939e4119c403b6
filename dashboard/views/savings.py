"""The page Savings."""

from dashboard import parts

parts.title("Savings", "What does caching save, and where does it cost?")
