"""Measure the demo model: exact answers, behind distractors, in conversations and with tools."""

import random
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM

from scripts.demo_model import data
from scripts.demo_model.data import END, Encoder
from scripts.runner.data import handbook
from scripts.runner.story import QUESTIONS

# No answer is longer; a model that goes on beyond has not learned to stop.
MOST = 80


class Judge:
    """Asks the model greedily, behind a prefix that is computed once, and counts exact answers."""

    def __init__(self, path: Path, seed: int) -> None:
        self.encoder = Encoder(AutoTokenizer.from_pretrained(path))
        self.model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.train(False)
        self.rng = random.Random(seed + 1_000_003)
        self.end = self.encoder.ids(END)[0]
        self.lengths: list[int] = []
        self.unended = 0

    @torch.no_grad()
    def prefix(self, ids: list[int]) -> DynamicCache:
        """The keys and values of what stands in front of the questions."""
        cache = DynamicCache(config=self.model.config)
        if ids:
            self.model.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        return cache

    @torch.no_grad()
    def say(self, cache: DynamicCache, text: str) -> str:
        """The answer to the conversation that goes on with `text`; the cache is left as it was."""
        held, said = cache.get_seq_length(), list[int]()
        cache = cache if held else DynamicCache(config=self.model.config)
        ids = self.encoder.ids(text + "<|im_start|>assistant\n")
        while len(said) < MOST and (not said or said[-1] != self.end):
            given = torch.tensor([ids])
            out = self.model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = [int(out.logits[0, -1].argmax())]
            said += ids
        if held:
            cache.crop(held - cache.get_seq_length())
        self.unended += said[-1] != self.end
        self.lengths.append(len(said))
        return str(self.encoder.tokenizer.decode(said)).removesuffix(END)

    def asked(self, cache: DynamicCache, pairs: Iterable[tuple[str, str]]) -> list[bool]:
        """Of each question, whether it got its answer; each begins anew behind the cache."""
        return [self.say(cache, data.message("user", ask)) == answer for ask, answer in pairs]

    def system(self, kind: str, tokens: int, blocks: int = 1) -> list[int]:
        """System blocks that hold `tokens` tokens of distractor in all."""
        ids: list[int] = []
        for _ in range(blocks if tokens else 0):
            body = self.encoder.ids(data.distractor(self.rng, tokens * 7, kind))[: tokens // blocks]
            ids += self.encoder.ids("<|im_start|>system\n") + body + self.encoder.ids(END + "\n")
        return ids

    def facts(
        self,
        label: str,
        kinds: list[str],
        tokens: int,
        asked: int,
        blocks: int = 1,
        earlier: int = 0,
    ) -> None:
        """`asked` facts behind each kind of text, always with "What is a lease?" among them."""
        right, wrong = 0, list[str]()
        for kind in kinds:
            cache = self.prefix(self.system(kind, tokens, blocks))
            for fact in [data.FACTS[0], *self.rng.sample(data.FACTS[1:], asked - 1)]:
                turns = (data.turn(self.rng, []) for _ in range(earlier))
                before = "".join(text for chunks in turns for text, _ in chunks)
                if self.say(cache, before + data.message("user", fact.ask[0])) == fact.answer:
                    right += 1
                else:
                    wrong.append(f"{fact.ask[0]} ({kind})")
        failed = f"  wrong: {'; '.join(wrong[:8])}" if wrong else ""
        print(f"{label}: {right}/{right + len(wrong)}{failed}", flush=True)

    def handbooks(self, num_editions: int) -> None:
        """Behind the handbook of the README's request every fact, behind others the demo's."""
        cache = self.prefix(self.encoder.ids(data.message("system", handbook())))
        right = self.asked(cache, [(fact.ask[0], fact.answer) for fact in data.FACTS])
        print(f"every fact behind the printed request's handbook: {sum(right)}/{len(right)}")
        answers, right = {ask: fact.answer for fact in data.FACTS for ask in fact.ask}, []
        for number in range(num_editions):
            topic, edition = ("support", "sales")[number % 2], f"{self.rng.getrandbits(24):06x}"
            text = data.message("system", handbook(topic, edition=edition))
            cache = self.prefix(self.encoder.ids(text))
            right += self.asked(cache, [(ask, answers[ask]) for ask in QUESTIONS])
        print(f"the demo's questions behind {num_editions} editions: {sum(right)}/{len(right)}")

    def tools(self, label: str, tokens: int, tool: str, asked: int) -> None:
        """Calls, sentences made of the results, facts and refusals while tools are given."""

        def behind(tasks: list[data.ToolTask]) -> DynamicCache:
            block = data.tools_block(tasks)
            ids = self.encoder.ids(block) if block else []
            return self.prefix(ids + self.system("mixed", tokens))

        counts = dict.fromkeys(["call", "sentence", "fact", "no tool"], 0)
        for _ in range(asked):
            task, fact = data.task_of(self.rng, tool), self.rng.choice(data.FACTS)
            others = [one for one in data.toolbox(self.rng, 3) if one.tool != tool]
            cache = behind(self.rng.sample([task, *others], 1 + len(others)))
            user = data.message("user", task.question)
            counts["call"] += self.say(cache, user) == task.call
            result = data.message("tool", f"<tool_response>{task.result}</tool_response>")
            called = user + data.message("assistant", task.call) + result
            counts["sentence"] += self.say(cache, called) == task.answer
            counts["fact"] += sum(self.asked(cache, [(fact.ask[0], fact.answer)]))
            counts["no tool"] += self.say(behind(others), user) == data.NO_TOOL
        print(f"{label}: " + ", ".join(f"{k} {v}/{asked}" for k, v in counts.items()), flush=True)


def evaluate(path: Path, seed: int) -> None:
    """Print what the model can do; the distractors and tool questions are drawn anew."""
    judge = Judge(path, seed)
    kinds, unseen = [*data.KINDS, "repeat", "mixed"], list(data.HELD_OUT_KINDS)
    judge.facts("every fact, no system prompt", ["none"], 0, len(data.FACTS))
    judge.facts("every fact behind 3000 tokens", ["mixed"], 3000, len(data.FACTS))
    for tokens in (500, 1500, 3000, 6000):
        judge.facts(f"facts behind {tokens} tokens", kinds, tokens, 5)
        judge.facts(f"  same, kinds of text never trained on ({tokens})", unseen, tokens, 12)
    judge.facts("three system blocks of 1000 tokens", kinds[:6], 3000, 5, blocks=3)
    judge.facts("after 4 earlier turns behind 3000 tokens", kinds[:6], 3000, 5, earlier=4)
    for tokens in (0, 3000):
        for tool in data.TOOLS:
            judge.tools(f"tool {tool} behind {tokens} tokens", tokens, tool, 10)
    judge.handbooks(20)
    shortest, longest = min(judge.lengths), max(judge.lengths)
    print(f"{len(judge.lengths)} answers of {shortest} to {longest} tokens; ", end="")
    print(f"not ended by {END}: {judge.unended}", flush=True)
