"""What the engine makes of chat templates, and of the calls that their models write.

    python -m scripts.docs.templates [--write] [--cost]

The templates are those of tests/engine/text, written for this project with the behaviour of the
models' own, and the real ones in the folder that HOLDFAST_TEMPLATES names, by default
shared/templates beside the project. Prints the tables of engine/README.md; with --write they are
put there. --cost prints what renders cost.
"""

from collections.abc import Sequence
from pathlib import Path

from scripts.bench.report import markdown
from scripts.setup.options import parse
from scripts.stack import ROOT
from tests.engine.text import written_calls
from tests.engine.text.conversations import call_template_paths, template_paths
from tests.engine.text.template_runs import measure

README = ROOT / "engine" / "README.md"
BEGIN, END = "<!-- templates -->", "<!-- /templates -->"
CALLS_BEGIN, CALLS_END = "<!-- calls -->", "<!-- /calls -->"
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


def calls_tables(paths: Sequence[Path]) -> str:
    """What is parsed and forced, and behind it what is replayed where there are calls."""
    models = {path.stem: written_calls.model_of(path.read_text("utf-8")) for path in paths}
    parsed = [[name, *written_calls.row(model)] for name, model in models.items()]
    replayed = [
        [name, *written_calls.replay_row(model)]
        for name, model in models.items()
        if model.tool_format
    ]
    told = "Replayed with the tokens that were sampled:"
    tables = markdown(written_calls.HEADS, parsed), markdown(written_calls.REPLAY_HEADS, replayed)
    return f"{tables[0]}\n\n{told}\n\n{tables[1]}"


def main() -> None:
    options = parse(__doc__, write=(False, "put the tables into engine/README.md"))
    paths = template_paths()
    written = {
        (BEGIN, END): table(paths),
        (CALLS_BEGIN, CALLS_END): calls_tables([*paths, *call_template_paths()]),
    }
    if not options.write:
        print("\n\n".join(written.values()))
        return
    text = README.read_text("utf-8")
    for (begin, end), tables in written.items():
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{tables}\n\n{end}{rest.partition(end)[2]}"
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
