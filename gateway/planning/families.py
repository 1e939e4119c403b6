"""The shapes of common models, in a file of data."""

import tomllib
from pathlib import Path

FAMILIES = Path(__file__).parent / "families.toml"


def family_names() -> list[str]:
    return list(tomllib.loads(FAMILIES.read_text("utf-8")))
