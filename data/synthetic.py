"""Synthetic long-context documents: an answer is hidden far from its question, in running text.

Four tasks, after RULER (arXiv 2404.06654): `needle` (the value of one key of many), `variables` (assignment chains),
`common_words` (the most frequent words of a list) and `questions` (one of many question-answer pairs, asked again). A
document is a function of (split, task, length, number), so training and evaluation never share one: the splits have
seeds and alphabets of names of their own.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

SPLITS = ("train", "eval")
# A name is drawn from consonants and vowels of its split alone, so that no key of one occurs in the other.
_LETTERS = {"train": ("bdfglmnprt", "aeiou"), "eval": ("ckhjsvwxzq", "aeiou")}


@dataclass(frozen=True)
class Retrieval:
    """A prompt that ends where the answer begins; the training document is both together."""

    task: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.answer}"


def generate(
    task: str, *, split: str, num_tokens: int, count_tokens: Callable[[str], int], haystack: str, number: int
) -> Retrieval:
    """Document `number` of a task, of at most `num_tokens` tokens and as near to it as whole sentences get.

    count_tokens: of a text, by the tokenizer that will read it. haystack: running text to hide in; a place in it is
    drawn for each document. Raises ValueError when even the shortest document of the task is longer.
    """
    if task not in TASKS or split not in SPLITS:
        raise ValueError(f"task {task!r} and split {split!r} must be of {', '.join(TASKS)} and of {', '.join(SPLITS)}.")
    seed = hashlib.sha256(f"{split}:{task}:{num_tokens}:{number}".encode()).digest()
    rng = random.Random(seed)
    make = TASKS[task](rng, _Names(rng, split))
    sentences = _sentences(haystack)
    if not sentences:
        raise ValueError("the haystack holds no sentence. Give running text with spaces in it.")
    start = rng.randrange(len(sentences))
    state = rng.getstate()

    def at_size(size: int) -> Retrieval:
        rng.setstate(state)
        filler = [sentences[(start + index) % len(sentences)] for index in range(size)]
        return Retrieval(task, *make(filler))

    # the largest filler that fits, by doubling and halving: tokens of a text are not additive
    low, high = 0, 1
    if count_tokens(at_size(0).text) > num_tokens:
        raise ValueError(f"a {task} document does not fit into {num_tokens} tokens. Raise --tokens.")
    while count_tokens(at_size(high).text) <= num_tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count_tokens(at_size(middle).text) <= num_tokens else (low, middle)
    return at_size(low)


class _Names:
    """Pronounceable names of a split, no two alike."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self._rng, (self._consonants, self._vowels) = rng, _LETTERS[split]
        self._taken: set[str] = set()

    def new(self) -> str:
        (name,) = self.others(1)
        self._taken.add(name)
        return name

    def others(self, number: int) -> list[str]:
        """Names unlike each other and unlike those of `new`."""
        found: dict[str, None] = {}
        while len(found) < number:
            name = "".join(self._rng.choice(self._consonants) + self._rng.choice(self._vowels) for _ in range(4))
            if name not in self._taken:
                found[name] = None
        return list(found)


_Make = Callable[[list[str]], tuple[str, str]]


def _needle(rng: random.Random, names: _Names) -> _Make:
    values = {names.new(): str(rng.randrange(10**6, 10**7)) for _ in range(4)}
    asked = rng.choice(list(values))
    needles = [f"The secret number of {key} is {value}." for key, value in values.items()]

    def make(filler: list[str]) -> tuple[str, str]:
        text = " ".join(_hide(rng, needles, filler))
        return f"{text}\nQuestion: what is the secret number of {asked}?\nAnswer:", values[asked]

    return make


def _variables(rng: random.Random, names: _Names) -> _Make:
    chains = []
    for _ in range(3):
        chain, value = [names.new() for _ in range(4)], str(rng.randrange(10**4, 10**5))
        lines = [f"Let {chain[0]} = {value}."]
        lines += [f"Let {later} = {earlier}." for earlier, later in pairwise(chain)]
        chains.append((chain, value, lines))
    (chain, value, _), *_ = rng.sample(chains, 3)

    def make(filler: list[str]) -> tuple[str, str]:
        text = " ".join(_hide(rng, [line for _, _, lines in chains for line in lines], filler))
        return f"{text}\nQuestion: which variables have the value {value}?\nAnswer:", ", ".join(chain)

    return make


def _common_words(rng: random.Random, names: _Names) -> _Make:
    common = [names.new() for _ in range(3)]

    def make(filler: list[str]) -> tuple[str, str]:
        # every other word is there three times, those asked for at least six times
        words = names.others(len(filler)) * 3
        words += common * max(6, len(words) // 50)
        rng.shuffle(words)
        question = "Question: which three words are the most frequent?\nAnswer:"
        return f"Words: {' '.join(words)}\n{question}", ", ".join(sorted(common))

    return make


def _questions(rng: random.Random, names: _Names) -> _Make:
    asked, answer = names.new(), names.new()

    def make(filler: list[str]) -> tuple[str, str]:
        others = names.others(2 * len(filler))
        pairs = [*zip(others[::2], others[1::2], strict=True), (asked, answer)]
        rng.shuffle(pairs)
        body = "\n".join(f"Question: who is a friend of {who}?\nAnswer: {friend}" for who, friend in pairs)
        return f"{body}\nQuestion: who is a friend of {asked}?\nAnswer:", answer

    return make


TASKS: dict[str, Callable[[random.Random, _Names], _Make]] = {
    "needle": _needle,
    "variables": _variables,
    "common_words": _common_words,
    "questions": _questions,
}


def _hide(rng: random.Random, needles: list[str], filler: list[str]) -> list[str]:
    """The filler with the needles at places of their own, in their order."""
    places = sorted(rng.randint(0, len(filler)) for _ in needles)
    hidden = list(filler)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        hidden.insert(place, needle)
    return hidden


def _sentences(text: str) -> list[str]:
    """Pieces of about 20 words."""
    words = text.split()
    return [" ".join(words[start : start + 20]) for start in range(0, len(words), 20)]
