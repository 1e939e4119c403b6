"""What the engine makes of chat templates, and of the calls that their models write.

    python -m scripts.docs.templates

The templates are those of tests/engine/text, written for this project with the behaviour of the
models' own, and the real ones in the folder that HOLDFAST_TEMPLATES names, by default
shared/templates beside the project. Prints a table of tokens, boundaries and reads, one of calls
that are parsed and forced, and one of calls that are replayed with the tokens that were sampled.
"""

from collections.abc import Sequence
from pathlib import Path

from scripts.bench.report import markdown
from tests.engine.text import written_calls
from tests.engine.text.conversations import call_template_paths, template_paths
from tests.engine.text.template_runs import measure

HEADS = (
    "template",
    "tools, thinking",
    "tokens as in one call",
    "boundaries lost",
    "floored",
    "turns 2 to 12 that read all",
    "what it can't take",
)


def table(paths: Sequence[Path]) -> str:
    rows = []
    for path in paths:
        found = measure(path)
        one_shot, lost, reads = (
            f"{some} of {all_}" for some, all_ in (found.one_shot, found.lost, found.reads)
        )
        counts = (one_shot, lost, found.inexact, reads)
        rows.append([found.name, found.formats, *counts, found.needs])
    return markdown(HEADS, rows)


def calls_tables(paths: Sequence[Path]) -> list[str]:
    """What is parsed and forced, and what is replayed where there are calls."""
    models = {path.stem: written_calls.model_of(path.read_text("utf-8")) for path in paths}
    parsed = [[name, *written_calls.row(model)] for name, model in models.items()]
    replayed = [
        [name, *written_calls.replay_row(model)]
        for name, model in models.items()
        if model.tool_format
    ]
    return [
        markdown(written_calls.HEADS, parsed),
        markdown(written_calls.REPLAY_HEADS, replayed),
    ]


def main() -> None:
    paths = template_paths()
    print("\n\n".join([table(paths), *calls_tables([*paths, *call_template_paths()])]))


if __name__ == "__main__":
    main()
