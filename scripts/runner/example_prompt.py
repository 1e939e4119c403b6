"""A long system prompt, the same every time, for the demo and the printed request."""

_SUBJECTS = (
    "a support agent",
    "the night shift",
    "every reviewer",
    "a new colleague",
    "the release manager",
    "an auditor",
    "the person on call",
)
_RULES = (
    "answers the customer in one short paragraph and names the page of the manual that was used",
    "writes down the order number before asking for anything else, and repeats it at the end",
    "never promises a date; the planner is asked first and the answer is copied word for word",
    "checks the last three entries of the log before touching a machine that reported a fault",
    "hands the case over in writing, with what was tried, what is known and what is still open",
    "keeps prices out of the reply unless the customer asked for them in this conversation",
    "closes the ticket only when the customer has said that the answer solved the problem",
    "uses plain words, explains each term once, and links to the glossary for the rest",
)


def handbook(topic: str = "support", num_rules: int = 90, edition: str = "") -> str:
    """Write a handbook. Editions differ from the first words on, so that they share nothing."""
    head = f"Edition {edition}. " if edition else ""
    lines = [f"{head}You work with the {topic} handbook. Answer questions in one sentence.\n"]
    for number in range(1, num_rules + 1):
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        rule = _RULES[(number * 5 + number // 8) % len(_RULES)]
        lines.append(f"{topic.title()} rule {number}: {subject} {rule}.")
    return "\n".join(lines)
