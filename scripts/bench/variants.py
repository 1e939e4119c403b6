"""What a model's answers lose when it reads the entries of a sibling: a copy that was trained
further.

The copy is trained on this project's own pages for some steps, in all weights or by a LoRA that is
merged. Then both directions are profiled, as `python -m engine profile-variant` does: the copy
reads the base's entries, and the base reads the copy's.
"""

import random
import shutil
import sys
import time
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.compute.variants import profile, table_of
from engine.settings import DEMO_MODEL
from scripts.setup.options import parse
from scripts.stack import ROOT

WINDOW = 256
ROWS = 4


def main() -> int:
    options = parse(
        __doc__,
        model=(DEMO_MODEL, "a directory of a model with full attention"),
        steps=(40, "of AdamW, 4 windows of 256 tokens each"),
        rate=(1e-4, "the learning rate"),
        rank=(0, "of a LoRA on all linear layers; 0 trains all weights"),
        save=("", "a directory that the copy is written to, for `profile-variant --write`"),
        threads=1,
    )
    torch.set_num_threads(options.threads)
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(options.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    pages = "\n".join(path.read_text("utf-8") for path in sorted(ROOT.glob("*/*.md")))
    tokens = torch.tensor(tokenizer.encode(pages, add_special_tokens=False))
    copy = deepcopy(base)
    losses = []
    began = time.monotonic()
    if options.rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(task_type="CAUSAL_LM", r=options.rank, target_modules="all-linear")
        copy = get_peft_model(copy, lora)
    weights = [weight for weight in copy.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.rate)
    rng = random.Random(1)
    for _ in range(options.steps):
        starts = [rng.randrange(len(tokens) - WINDOW) for _ in range(ROWS)]
        rows = torch.stack([tokens[start : start + WINDOW] for start in starts])
        loss = copy(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if options.rank:
        copy = copy.merge_and_unload()
    if options.save:
        # The base's tokenizer and template go with the copy.
        shutil.copytree(options.model, options.save)
        copy.save_pretrained(options.save)
    print(
        f"{options.model}: {options.steps} steps at {options.rate:g},"
        f" {f'LoRA of rank {options.rank}' if options.rank else 'all weights'}, in"
        f" {time.monotonic() - began:.0f} s; loss {losses[0]:.2f} to"
        f" {sum(losses[-5:]) / len(losses[-5:]):.2f}"
    )
    for name, reader, sibling in (("copy reads base", copy, base), ("base reads copy", base, copy)):
        print(f"\n{name}\n{table_of(list(profile(reader.eval(), sibling.eval())))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
