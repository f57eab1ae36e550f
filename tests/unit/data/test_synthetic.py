import json
import re
from collections import Counter

import pytest

from msa_pretrain.data.synthetic import SPLITS, TASKS, generate
from msa_pretrain.scripts import make_retrieval_data

HAYSTACK = " ".join(f"word{number}" for number in range(2000))


def make(task, number=0, split="train", num_tokens=1500, haystack=HAYSTACK):
    return generate(task, split=split, num_tokens=num_tokens, count_tokens=len, haystack=haystack, number=number)


def solve(task, prompt):
    """The answer, found by reading."""
    if task == "needle":
        (key,) = re.findall(r"secret number of (\w+)\?", prompt)
        (value,) = re.findall(rf"secret number of {key} is (\d+)\.", prompt)
        return value
    if task == "variables":
        (value,) = re.findall(r"have the value (\d+)\?", prompt)
        known = {value}
        found = []
        for name, source in re.findall(r"Let (\w+) = (\w+)\.", prompt):
            if source in known:
                known.add(name)
                found.append(name)
        return ", ".join(found)
    if task == "common_words":
        counts = Counter(prompt.split("\n")[0].removeprefix("Words: ").split()).most_common()
        assert counts[2][1] > (counts[3][1] if len(counts) > 3 else 0)
        return ", ".join(sorted(word for word, _ in counts[:3]))
    *_, asked = re.findall(r"friend of (\w+)\?", prompt)
    (answer,) = re.findall(rf"friend of {asked}\?\nAnswer: (\w+)", prompt)
    return answer


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_follows_from_the_prompt(task):
    answers = set()
    for number in range(20):
        made = make(task, number)
        assert solve(task, made.prompt) == made.answer
        assert made.text == f"{made.prompt} {made.answer}" and 1000 < len(made.text) <= 1500
        assert made == make(task, number)
        answers.add(made.answer)
    assert len(answers) == 20


@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_met_closely(task):
    for num_tokens in (1000, 5000, 20_000):  # to within a sentence of twenty words
        assert num_tokens - 250 < len(make(task, num_tokens=num_tokens).text) <= num_tokens


def test_training_and_evaluation_share_no_name():
    names = {}
    for split in SPLITS:
        texts = [make(task, number, split).text for task in TASKS for number in range(10)]
        found = re.findall(r"(?:of|Let|=|Words:|Answer:) ([a-z]{8})\b", " ".join(texts))
        names[split] = set(found)
    assert len(names["train"]) > 100 and not names["train"] & names["eval"]


def test_needles_are_spread_over_the_document():
    places = []
    for number in range(100):
        prompt = make("needle", number).prompt
        (key,) = re.findall(r"secret number of (\w+)\?", prompt)
        places.append(prompt.index(f"of {key} is") / len(prompt))
    assert min(places) < 0.1 and max(places) > 0.85 and 0.35 < sum(places) / 100 < 0.65


def test_the_script(tmp_path, capsys):
    arguments = ["--tokens", "800", "1600", "--number", "3", "--tokenizer", "byte"]
    for split in SPLITS:
        make_retrieval_data.main([*arguments, "--split", split, "--output", str(tmp_path / split)])
    records = {split: [json.loads(line) for line in (tmp_path / split).open()] for split in SPLITS}
    for split, found in records.items():
        assert Counter(record["task"] for record in found) == dict.fromkeys(TASKS, 6)
        assert all(solve(record["task"], record["prompt"]) == record["answer"] for record in found)
        assert all(len(record["text"].encode()) <= (799 if n < 12 else 1599) for n, record in enumerate(found)), split
    assert "24 documents, split eval" in capsys.readouterr().out


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"task 'poem' and split 'train' must be of needle, variables"):
        make("poem")
    with pytest.raises(ValueError, match=r"a needle document does not fit into 100 tokens"):
        make("needle", num_tokens=100)
    with pytest.raises(ValueError, match="the haystack holds no sentence"):
        make("needle", haystack=" ")
    with pytest.raises(SystemExit, match=r"make_retrieval_data: .*No such file"):
        make_retrieval_data.main(
            ["--split=eval", "--tokens=9", "--number=1", "--tokenizer=byte", "--haystack=absent", "--output=x"]
        )
