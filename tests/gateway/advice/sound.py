"""Shapes of traffic in which nothing is wrong, by seed."""

from collections.abc import Callable

from engine.protocol import Message, Prompt, TextPart
from tests.gateway.advice.shapes import Author, Sent, assistant, at, single, user


def conversations(author: Author) -> list[Sent]:
    tools, text, sent = author.tools(), author.text(), []
    for talk in range(author.chance.randint(2, 5)):
        said: list[Message] = []
        for turn in range(author.chance.randint(4, 14)):
            said = [*said, user(author.line())]
            sent.append(
                Sent(at(talk * 40 + turn), Prompt(said, tools=tools, system=[TextPart(text)]))
            )
            said = [*said, assistant(author.text(3))]
    return sent


def documents(author: Author) -> list[Sent]:
    text, sent = author.text(), []
    for number in range(author.chance.randint(4, 9)):
        document = author.text(24)
        for question in range(author.chance.randint(1, 5)):
            message = user(document, author.line())
            sent.append(Sent(at(number * 6 + question), Prompt([message], system=[TextPart(text)])))
    return sent


def customers(author: Author) -> list[Sent]:
    """Each customer has a system prompt of his own."""
    texts = [author.text(20) for _ in range(author.chance.randint(5, 14))]
    return [
        Sent(at(number), single(author, [], author.chance.choice(texts)))
        for number in range(author.chance.randint(20, 60))
    ]


def labels(author: Author) -> list[Sent]:
    text = author.text()
    return [
        Sent(at(number), Prompt([user(author.text(6))], system=[TextPart(text)]))
        for number in range(author.chance.randint(10, 50))
    ]


def released(author: Author) -> list[Sent]:
    """The system prompt is changed once."""
    tools, text, sent = author.tools(), author.text(), []
    total = author.chance.randint(24, 50)
    for number in range(total):
        system = text if number < total // 2 else f"{text}\nBe brief."
        sent.append(Sent(at(number), single(author, tools, system)))
    return sent


def two_agents(author: Author) -> list[Sent]:
    num = author.chance.randint(3, 7)
    agents = [(author.tools(num), author.text()), (author.tools(num), author.text())]
    sent = []
    for number in range(author.chance.randint(14, 40)):
        tools, text = author.chance.choice(agents)
        sent.append(Sent(at(number), single(author, tools, text)))
    return sent


def compacted(author: Author) -> list[Sent]:
    tools, text, sent = author.tools(), author.text(), []
    said: list[Message] = []
    for number in range(author.chance.randint(24, 60)):
        if len(said) > 20:
            said = [user("Summary: " + author.text(6)), assistant("Understood.")]
        said = [*said, user(author.line())]
        sent.append(Sent(at(number), Prompt(said, tools=tools, system=[TextPart(text)])))
        said = [*said, assistant(author.text(3))]
    return sent


def forked(author: Author) -> list[Sent]:
    """Some turns are asked again, or in other words."""
    text, sent = author.text(), []
    said: list[Message] = []
    for number in range(author.chance.randint(10, 24)):
        if said and author.chance.random() < 0.25:
            said = said[:-2]
        said = [*said, user(author.line())]
        sent.append(Sent(at(number), Prompt(said, system=[TextPart(text)])))
        said = [*said, assistant(author.text(3))]
    return sent


def examples(author: Author) -> list[Sent]:
    shots = [
        message
        for _ in range(author.chance.randint(3, 8))
        for message in (user(author.text(3)), assistant(author.line()))
    ]
    return [
        Sent(at(number), Prompt([*shots, user(author.line())]))
        for number in range(author.chance.randint(10, 40))
    ]


def split_test(author: Author) -> list[Sent]:
    """Two wordings of one prompt, chosen by chance."""
    text, tools = author.text(), author.tools()
    wordings = [f"Be polite.\n{text}", f"Be brief.\n{text}"]
    return [
        Sent(at(number), single(author, tools, author.chance.choice(wordings)))
        for number in range(author.chance.randint(24, 60))
    ]


SOUND: dict[str, Callable[[Author], list[Sent]]] = {
    made.__name__: made
    for made in (
        conversations,
        documents,
        customers,
        labels,
        released,
        two_agents,
        compacted,
        forked,
        examples,
        split_test,
    )
}
