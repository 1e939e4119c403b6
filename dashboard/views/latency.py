"""The page Latency."""

from dashboard import parts

parts.title("Latency", "How much sooner does a read prompt answer?")
