"""Prompts of a given length that no other test has sent."""

from itertools import count
from typing import Any

MODEL = "holdfast-demo"
_numbers = count()


def handbook(num_rules: int) -> str:
    """About 21 tokens a rule; different on every call, from its first words on."""
    edition = next(_numbers)
    rules = (f"Rule {i}: the staff must file form {i * 7} before noon." for i in range(num_rules))
    return f"Handbook, edition {edition}. " + " ".join(rules)


def marked(text: str, ttl: str = "5m") -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}]
