"""The page Prefixes and leases."""

from dashboard import parts

parts.title("Prefixes and leases", "What is held now, for whom, and for how long?")
