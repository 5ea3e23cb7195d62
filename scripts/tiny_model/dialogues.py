"""The corpus as a language model meets it: plain pages, questions, documents with questions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from tiny_model.corpus import Entry

__all__ = ["Message", "epoch", "is_favourite"]

LONGEST_ANSWER = 900  # characters; whole paragraphs up to here
LONGEST_PAGE = 6000
DOCUMENT_SHARE = 0.7  # characters of documents per character of the corpus, an epoch

# What a reader of a demo will ask about: learned by heart, where the rest is learned in passing.
_FAVOURITES = """
    builtins textwrap json math itertools functools collections os.path re random pathlib time
    heapq bisect shutil queue string statistics contextlib dataclasses copy glob tempfile
"""
FAVOURITES = frozenset(_FAVOURITES.split())

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows the Python standard library.",
    "You answer questions about Python, briefly and exactly.",
    "Answer the question.",
)
NAME_QUESTIONS = (
    "What does {name} do?",
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "Explain: {name}",
    "How do I use {name}?",
    "Tell me about {name}.",
    "Describe {name}.",
)
TOPIC_QUESTIONS = (
    "Explain: {name}",
    "Explain {name}.",
    "Tell me about {name}.",
    "What should I know about {name}?",
    "What does the Python language reference say about {name}?",
)
DOCUMENT_QUESTIONS = (
    "What does the document say about {name}?",
    "According to the document, what does {name} say?",
    "Explain {name}.",
    "What is {name}?",
    "Find {name} in the document.",
)
DOCUMENT_PROMPTS = (
    "Answer from this document.",
    "Use the following document to answer the questions.",
    "You are a helpful assistant. Here is a document.",
    "Document:",
)


class Message(NamedTuple):
    """One turn: ``role`` is system, user, assistant, or text for a page without turns."""

    role: str
    content: str


def is_favourite(entry: Entry) -> bool:
    """Whether the entry is one of those learned by heart."""
    twin = entry.name.startswith(("bytearray.", "memoryview."))  # says what str and bytes say
    return entry.is_topic or (entry.group in FAVOURITES and not twin)


def epoch(
    entries: Sequence[Entry], random: Random, document_length: int
) -> Iterator[list[Message]]:
    """The whole corpus once, shuffled: a page and a question for each entry, and documents.

    ``document_length`` is how long a document with questions may be, in characters.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    documents = DOCUMENT_SHARE * sum(len(entry.text) for entry in entries) / document_length
    jobs: list[tuple[str, Entry]] = []
    for entry in entries:
        favourite = is_favourite(entry)
        jobs += [("page", entry)] if random.random() < (0.6 if favourite else 0.3) else []
        jobs += [("question", entry)] * (3 if favourite else int(random.random() < 0.7))
        jobs += [("document", entry)] if random.random() < documents / len(entries) else []
    random.shuffle(jobs)
    for kind, entry in jobs:
        if kind == "page":
            yield plain_page(entry)
        elif kind == "question":
            yield question_dialogue(entry, groups[entry.group], random)
        else:
            yield document_dialogue(entry, groups[entry.group], entries, random, document_length)


def plain_page(entry: Entry) -> list[Message]:
    """The entry as a page of a manual: its signature or title, then all of its text."""
    return [Message("text", f"{_headline(entry)}\n\n{entry.text[:LONGEST_PAGE]}")]


def question_dialogue(entry: Entry, group: Sequence[Entry], random: Random) -> list[Message]:
    """A question about the entry, sometimes a second one about a neighbour."""
    messages = []
    if random.random() < 0.4:
        messages.append(Message("system", random.choice(SYSTEM_PROMPTS)))
    asked = [entry] + ([random.choice(group)] if random.random() < 0.25 else [])
    for one in asked:
        questions = TOPIC_QUESTIONS if one.is_topic else NAME_QUESTIONS
        messages += _turn(one, random.choice(questions), random)
    return messages


def document_dialogue(
    entry: Entry, group: Sequence[Entry], entries: Sequence[Entry], random: Random, length: int
) -> list[Message]:
    """A document of several entries, then questions whose answers are passages out of it."""
    chosen = {entry.name: entry}
    size = len(_section(entry))
    for _ in range(60):
        other = random.choice(group if random.random() < 0.7 else entries)
        if other.name not in chosen and size + len(_section(other)) <= length:
            chosen[other.name] = other
            size += len(_section(other))
    parts = list(chosen.values())
    random.shuffle(parts)
    document = "\n\n".join(_section(part) for part in parts)
    asked = random.sample(parts, k=min(len(parts), random.choice((1, 1, 2, 3))))
    messages = []
    for index, one in enumerate(asked):
        question, answer = _turn(one, random.choice(DOCUMENT_QUESTIONS), random)
        if index == 0 and random.random() < 0.6:
            prompt = random.choice(DOCUMENT_PROMPTS)
            messages.append(Message("system", f"{prompt}\n\n{document}"))
        elif index == 0:
            question = Message("user", f"{document}\n\n{question.content}")
        messages += [question, answer]
    return messages


def _turn(entry: Entry, question: str, random: Random) -> tuple[Message, Message]:
    name = entry.name
    if entry.is_topic and random.random() < 0.5:
        name = name[0].lower() + name[1:]
    elif not entry.is_topic and random.random() < 0.15:
        name = f"{name}()" if entry.signature else f"the {name} documentation"
    return Message("user", question.format(name=name)), Message("assistant", _answer(entry.text))


def _headline(entry: Entry) -> str:
    return entry.signature if 0 < len(entry.signature) <= 120 else entry.name


def _section(entry: Entry) -> str:
    return f"# {entry.name}\n\n{_answer(entry.text)}"


def _answer(text: str) -> str:
    """Whole paragraphs up to the longest answer; the first one is cut by lines if it must be."""
    answer = ""
    for paragraph in text.split("\n\n"):
        if len(answer) + len(paragraph) > LONGEST_ANSWER:
            break
        answer += paragraph + "\n\n"
    return answer.strip() or text[:LONGEST_ANSWER].rpartition("\n")[0].strip() or text.strip()
