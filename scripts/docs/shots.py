"""Take the screenshots that dashboard/README.md shows, and check each page that is on them.

Two engines with traffic are drawn at three quarters of their size, the other states, widths and the
dark theme at half of it. The checks are those of `scripts.docs.page_matrix`. The table of pictures
in dashboard/README.md is written anew from the files that there are.

    python -m scripts.docs.shots [--out dashboard/screenshots] [--pages a,b] [--states two,empty]
"""

import io
import sys
from pathlib import Path

from PIL import Image

from scripts.bench.report import markdown
from scripts.docs.page_matrix import PAGES, look, stack_in
from scripts.setup.options import parse
from scripts.stack import ROOT

NUM_TURNS = 20_000
BEGIN = "<!-- pictures: written by scripts.docs.shots -->"
END = "<!-- end of pictures -->"
SHOTS = {
    "two": (("light", 1440, 0.75), ("dark", 1440, 0.5), ("light", 480, 0.5)),
    "empty": (("dark", 1200, 0.5),),
    "one": (("light", 1200, 0.5),),
    "four": (("dark", 1920, 0.5),),
    "month": (("light", 1920, 0.5),),
}
"""By state of the data: theme, width, and the picture's size against the page's."""


def main() -> int:
    options = parse(
        __doc__,
        out=ROOT / "dashboard" / "screenshots",
        pages=",".join(PAGES),
        states=",".join(SHOTS),
    )
    pages = [name for name in options.pages.split(",") if name in PAGES]
    options.out.mkdir(parents=True, exist_ok=True)
    num_problems = 0
    for state in options.states.split(","):
        with stack_in(state, NUM_TURNS) as stack:
            for theme, width, scale in SHOTS[state]:
                for drawn in look(stack, state, [theme], pages, [width]):
                    image = Image.open(io.BytesIO(drawn.picture)).convert("RGB")
                    size = round(image.width * scale), round(image.height * scale)
                    path = options.out / f"{drawn.name}.webp"
                    image.resize(size, Image.Resampling.LANCZOS).save(path, quality=50, method=6)
                    num_problems += len(drawn.problems)
                    print(path.name, *drawn.problems, sep="\n  ", flush=True)
    write_table(options.out, ROOT / "dashboard" / "README.md")
    print(f"{num_problems} problems")
    return 1 if num_problems else 0


def write_table(pictures: Path, readme: Path) -> None:
    """A row for each page, a column for each state that has pictures; between the two marks."""
    columns = []
    for state, shots in SHOTS.items():
        for theme, width, _ in shots:
            column = f"{state}-{theme}-{width}"
            if any(pictures.glob(f"*-{column}.webp")):
                columns.append(column)
    names = []
    for page in PAGES:
        names += [page, f"{page}-picked"]
    rows = []
    for name in names:
        files = [f"{name}-{column}.webp" for column in columns]
        cells = [f"[see](screenshots/{f})" if (pictures / f).exists() else "" for f in files]
        if any(cells):
            rows.append([name, *cells])
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    table = markdown(("page", *columns), rows)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
