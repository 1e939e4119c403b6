"""Environment variables that are nearly settings; without any package that is not installed yet."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches


def misspelt(environ: Mapping[str, str], known: Collection[str]) -> list[str]:
    """One line for each variable that is called almost like a known setting. Other names may be
    meant for other programs."""
    prefixes = tuple({name.partition("_")[0] + "_" for name in known})
    lines: list[str] = []
    for variable in sorted(environ):
        name = variable.removesuffix("_FILE")
        if variable.startswith(prefixes) and not {variable, name} & {*known}:
            close = get_close_matches(name, known, n=1, cutoff=0.9)
            lines += [f"{variable} is no setting: did you mean {setting}?" for setting in close]
    return lines
