"""Train the demo model that ships in engine/holdfast-demo, on a CPU, from nothing.

    python -m scripts.demo_model.train [--out DIR] [--minutes N] [--seed N]

The model only has to say the project's own sentences, call a tool and stop, but it has to do so
behind thousands of tokens of anything. So many steps put one long prefix, computed once and without
gradients, before several short conversations. The data depend on the seed; how far the training
gets in the given minutes depends on the machine.
"""

import argparse
import math
import random
import shutil
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from scripts.demo_model import data
from scripts.demo_model.data import CONTROL, MARKS, VOCAB, Encoder, Example
from scripts.setup.options import parse
from scripts.stack import ROOT

# A space or underscore belongs to a lower-case word only, and digits stand alone: a name or an id
# is then the same tokens in a question as behind a quote in JSON, so that the model can copy it.
SPLIT = (
    r"[ _]?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}\p{Ll}*|\p{L}|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s"
)
OUT = ROOT / "engine" / "holdfast-demo"


def build_tokenizer(out: Path, seed: int) -> None:
    """Train the byte-level BPE on the project's own text; template and settings are the model's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in CONTROL]
    marks = [AddedToken(t, special=False, normalized=False) for t in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(MARKS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(data.corpus(random.Random(seed)), trainer)
    tokenizer.add_tokens(marks)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if out != OUT:
            shutil.copy(OUT / name, out / name)


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write the weights in half the bytes; users load them as float32."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config)  # type: ignore[no-untyped-call]
    copy.bfloat16()
    copy.load_state_dict(state)
    copy.generation_config.do_sample = False
    copy.save_pretrained(out)


def draw_batch(
    rng: random.Random, encoder: Encoder, progress: float
) -> tuple[list[int], list[Example]]:
    """A shared prefix and the rows behind it. Prefixes get more frequent and longer with time."""
    prefix: list[int] = []
    boxes: list[list[data.ToolTask]] = []
    rows = [Example() for _ in range(4)]
    if rng.random() < 0.1 + 0.25 * progress:
        longest = 300 + (4500 if rng.random() < 0.9 else 7500) * progress
        size = int(math.exp(rng.uniform(math.log(40), math.log(longest))))
        many = rng.random() < 0.15
        box = data.toolbox(rng, 20 if many else 5) if many or rng.random() < 0.6 else []
        prefix = encoder.ids(data.tools_block(box)) if box else []
        prefix += encoder.systems(rng, size)
        rows = [Example() for _ in range(8)]
        width = 160
        boxes = [box] * len(rows)
    else:
        width = 440
        for row in rows:
            box = data.toolbox(rng, 3) if rng.random() < 0.45 else []
            encoder.add(row, [(data.tools_block(box), False)] if box else [])
            if rng.random() < 0.5:
                encoder.add_ids(row, encoder.systems(rng, rng.randint(10, 100)))
            boxes.append(box)
    for row, box in zip(rows, boxes, strict=True):
        while len(row.ids) < width:
            encoder.add(row, data.turn(rng, box))
        del row.ids[width + 100 :], row.learned[width + 100 :]
    return prefix, rows


def loss_of(model: LlamaForCausalLM, prefix: list[int], rows: list[Example], offset: int) -> Tensor:
    """Mean loss of the answers. A long prefix gets no gradient: the rows learn to ignore it."""
    cache = DynamicCache(config=model.config)
    if prefix:
        with torch.set_grad_enabled(len(prefix) <= 400):
            positions = torch.arange(offset, offset + len(prefix))[None]
            model.model(
                torch.tensor([prefix]),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        cache.batch_repeat_interleave(len(rows))
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows])
    learned = torch.tensor([row.learned + [False] * (width - len(row.ids)) for row in rows])[:, 1:]
    start = offset + len(prefix)
    positions = torch.arange(start, start + width)[None].expand(len(rows), -1)
    hidden = model.model(
        ids, position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state
    return functional.cross_entropy(model.lm_head(hidden[:, :-1][learned]), ids[:, 1:][learned])


def train(model: LlamaForCausalLM, encoder: Encoder, args: argparse.Namespace) -> None:
    """AdamW with a warm-up and a cosine over the given time; the weights are saved on the way."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    step = 0
    tokens = 0
    mean = 0.0
    model.train()
    while True:
        progress = (time.monotonic() - began) / (60 * args.minutes)
        if progress >= 1:
            break
        cosine = 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2
        rate = args.rate * min(1.0, (step + 1) / 50) * cosine
        for group in optimizer.param_groups:
            group["lr"] = rate
        prefix, rows = draw_batch(rng, encoder, progress)
        loss = loss_of(model, prefix, rows, rng.choice([0, rng.randint(0, 8000)]))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        tokens += len(prefix) + sum(len(row.ids) for row in rows)
        mean += (loss.item() - mean) * max(0.03, 1 / step)
        if step % 25 == 0:
            print(f"step {step} at {progress:.0%}, {tokens} tokens, loss {mean:.4f}", flush=True)
        if step % 200 == 0:
            save(model, args.out)
    spent = (time.monotonic() - began) / 60
    print(f"trained {step} steps on {tokens} tokens in {spent:.1f} minutes", flush=True)
    save(model, args.out)


def main() -> None:
    args = parse(
        __doc__,
        out=(OUT, "where the model goes; a tokenizer that is there is kept"),
        minutes=(45.0, "how long to train"),
        seed=0,
        rate=(1.5e-3, "the highest learning rate"),
        threads=1,
        init=(Path, "go on from the weights in this folder"),
    )
    torch.set_num_threads(args.threads)
    if not (args.out / "tokenizer.json").exists():
        build_tokenizer(args.out, args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    torch.manual_seed(args.seed)
    if args.init:
        model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:  # of the shipped model's shape, with weights drawn anew
        shape = LlamaConfig.from_pretrained(OUT)
        model = LlamaForCausalLM(shape)  # type: ignore[no-untyped-call]
    train(model, Encoder(tokenizer), args)


if __name__ == "__main__":
    main()
