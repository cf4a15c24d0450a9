"""The demo's prompts: the ones that are compared, and fillers of many lengths that make the batch busy.

Everything here is fixed text: the same call gives the same prompts.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

PROMPTS = (
    "Explain in simple words why the sky is blue.",
    "List five things to pack for a week in the mountains.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "A train travels 120 km in 1.5 hours. What is its average speed? Show the steps.",
    "Translate into French: The library opens at nine in the morning.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for a quick vegetable soup.",
    "Write a polite email that asks a colleague to move a meeting to Friday.",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Name three advantages and three drawbacks of working from home.",
    "Write a four-line poem about the first snow.",
    "How does a bicycle stay upright while it is moving?",
    "Summarize the water cycle in three sentences.",
    "What should I think about before I adopt a dog?",
    "Write an SQL query that counts the orders of each customer.",
)

_TOPICS = (
    "a quiet village by the sea",
    "the history of paper",
    "solar panels on a small house",
    "learning to play the piano as an adult",
    "how bread rises",
    "a night train through the Alps",
    "the rules of chess",
    "growing tomatoes on a balcony",
    "why leaves change colour",
    "the first computers",
    "a walk in the rain",
    "saving money for a long journey",
)
_FILLERS = (
    "Write two sentences about {topic}.",
    "What would you tell a ten-year-old about {topic}? Use short words and one example from everyday life.",
    "{topic}?",
    (
        "I am preparing a talk of ten minutes about {topic} for people who have never heard of it. Suggest an outline "
        "with an opening question, three main points in a sensible order, a common misunderstanding that I should "
        "clear up, and a closing sentence that people will remember on their way home."
    ),
    "Give me three facts about {topic}, each in one line.",
    (
        "Compare {topic} with something that most people know well, and say where the comparison stops working. Then "
        "list two questions that an expert would still like to have answered."
    ),
)


def measured_prompts(count: int) -> list[str]:
    """The first `count` prompts that the demo compares.

    Raises:
        ValueError: `count` is not between 1 and the number of prompts there are.
    """
    if not 1 <= count <= len(PROMPTS):
        raise ValueError(f"prompts is {count}; the demo has 1 to {len(PROMPTS)} prompts to compare")
    return list(PROMPTS[:count])


def filler_prompts(count: int) -> list[str]:
    """`count` different prompts of varied length; none of them is a measured one."""
    prompts = []
    for i in range(count):
        shape, topic = _FILLERS[i % len(_FILLERS)], _TOPICS[(i // len(_FILLERS)) % len(_TOPICS)]
        text = shape.format(topic=topic)
        lap = i // (len(_FILLERS) * len(_TOPICS))
        prompts.append(text if lap == 0 else f"{text} ({lap + 1})")
    return [text[0].upper() + text[1:] for text in prompts]


def scatter(measured: list[T], fillers: list[T]) -> tuple[list[T], list[int]]:
    """A batch with the measured items spread evenly among the fillers, and where each measured item went."""
    size = len(measured) + len(fillers)
    positions = [(2 * i + 1) * size // (2 * len(measured)) for i in range(len(measured))]
    slots = dict(zip(positions, measured, strict=True))
    rest = iter(fillers)
    return [slots[i] if i in slots else next(rest) for i in range(size)], positions
