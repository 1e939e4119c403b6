"""The page Requests."""

from dashboard import parts

parts.title("Requests", "What happened to one request?")
