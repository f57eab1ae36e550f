"""What a resumed run may change of its data, and what would repeat or skip samples."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from msa_pretrain.data.indexed import FILES
from msa_pretrain.data.order import LongDocuments, Packing
from msa_pretrain.training.datasets import RunData, describe_uses, unique_labels
from msa_pretrain.training.metrics import find_metric


def config(num_samples=40, **changes):
    values = {"seq_length": 8, "seed": 0, "packing": Packing.concat, "long_documents": LongDocuments.split, **changes}
    return SimpleNamespace(
        training=SimpleNamespace(
            seq_length=values["seq_length"], seed=values["seed"], total_tokens=num_samples * values["seq_length"]
        ),
        data=SimpleNamespace(packing=values["packing"], long_documents=values["long_documents"]),
        total_samples=num_samples,
    )


@pytest.fixture
def sources(write, unique_documents):
    return write("a", unique_documents), write("b", [[4000 + n] * 9 for n in range(20)]), write("c", [[7] * 30] * 9)


def run_data(dataset):
    return RunData(dataset, [], [])


def test_what_is_to_come_may_change(build, sources, tmp_path, caplog):
    a, b, c = sources
    stored = run_data(build({a: 3, b: 1}, num_samples=40)).record(config(), 16)
    assert list(stored["consumed"].values()) == [12, 4]
    run_data(build({a: 0.75, b: 0.25}, num_samples=40)).check(stored, config(), 16)
    run_data(build({a: 3, b: 1}, (16, {c: 1}), (32, {a: 1}), num_samples=40)).check(stored, config(), 16)
    longer = run_data(build({a: 3, b: 1}, num_samples=80))
    longer.check(stored, config(80), 16)
    assert "planned for 40 samples and now is for 80: the order of the samples is the same" in caplog.text
    # the same data elsewhere, and a second resume from what the first one saves
    (tmp_path / "moved").mkdir()
    for path in FILES:
        shutil.copy(path(Path(a)), path(tmp_path / "moved" / "a"))
    moved = run_data(build({str(tmp_path / "moved" / "a"): 3, b: 1}, num_samples=80))
    moved.check(stored, config(80), 16)
    moved.check(longer.record(config(80), 24), config(80), 24)


def test_what_is_behind_may_not(build, sources, write):
    a, b, c = sources
    stored = run_data(build({a: 3, b: 1}, (8, {b: 1}), num_samples=40)).record(config(), 16)
    for stages in (
        [{a: 1, b: 1}, (8, {b: 1})],
        [{a: 3, b: 1}, (9, {b: 1})],
        [{a: 3, b: 1}],
        [{c: 3, b: 1}, (8, {b: 1})],
    ):
        with pytest.raises(
            ValueError, match=r"the blend of the 16 samples so far was .*from_tokens: 128, blend: \[PREFIX:"
        ):
            run_data(build(*stages, num_samples=40)).check(stored, config(), 16)
    same = run_data(build({a: 3, b: 1}, (8, {b: 1}), num_samples=40))
    for changes, expected in (
        ({"seed": 5}, r"Use training\.seed=0 \(it is 5\)\."),
        ({"packing": Packing.best_fit}, r"Use data\.packing=concat \(it is best_fit\)\."),
        ({"seq_length": 4, "seed": 1}, r"Use training\.seq_length=8 \(it is 4\), training\.seed=0 \(it is 1\)\."),
    ):
        with pytest.raises(ValueError, match=expected):
            same.check(stored, config(**changes), 16)
    with pytest.raises(
        ValueError, match=r"16 samples are consumed, more than the 12 .* Use training\.total_tokens=320"
    ):
        same.check(stored, config(12), 16)
    write("a", [[9] * 500])  # prepared anew under the same name
    with pytest.raises(ValueError, match="the blend of the 16 samples so far was"):
        run_data(build({a: 3, b: 1}, (8, {b: 1}), num_samples=40)).check(stored, config(), 16)


def test_lengths_that_have_begun_may_not_change_and_later_ones_may(build, sources):
    a, b, _ = sources

    def data(*lengths, num_samples=40):
        return run_data(build({a: 3, b: 1}, num_samples=num_samples, seq_length=lengths))

    stored = data((0, 8), (16, 16), (30, 32)).record(config(), 24)
    assert stored["lengths"] == [[0, 8], [16, 16]]
    data((0, 8), (16, 16)).check(stored, config(), 24)
    data((0, 8), (16, 16), (24, 64)).check(stored, config(), 24)
    for lengths in ([(0, 8)], [(0, 8), (12, 16)], [(0, 8), (16, 32)], [(0, 8), (16, 16), (20, 32)]):
        with pytest.raises(
            ValueError, match=r"the 24 samples so far had sequence length 8 from sample 0, 16 from samp"
        ):
            data(*lengths).check(stored, config(), 24)
    older = {name: value for name, value in stored.items() if name != "lengths"}
    with pytest.raises(ValueError, match=r"of an earlier version, which did not record the lengths"):
        data((0, 8), (16, 16)).check(older, config(), 24)
    # a blend that is to change from here on: 16 samples of 8 tokens and 8 of 16
    with pytest.raises(ValueError, match=r"from_tokens: 256, blend"):
        run_data(build({b: 1}, num_samples=40, seq_length=((0, 8), (16, 16)))).check(stored, config(), 24)


def test_a_record_survives_a_checkpoint(build, sources):
    """Megatron saves other types than these, and then refuses to load them."""

    def plain(value):
        if isinstance(value, dict):
            return all(type(key) is str and plain(item) for key, item in value.items())
        return all(map(plain, value)) if type(value) is list else type(value) in (str, int, float)

    assert plain(run_data(build({sources[0]: 1}, num_samples=40)).record(config(), 16))


def test_what_is_told_before_the_first_step(build, sources):
    a, b, _ = sources
    lines = describe_uses(build({a: 3, b: 1}, num_samples=80))
    assert lines[0].startswith(f"data {a}: 75.00% of the tokens, 60 samples, 480 tokens, 0.970 epochs, 0.00% padding")
    assert lines[1].startswith(f"data {b}: 25.00% of the tokens, 20 samples, 160 tokens, 0.800 epochs")


def test_labels_tell_sources_apart():
    for label in ("web_valid", "a.b-c"):
        assert find_metric(f"eval/valid/lm_loss/{label}").unit == "nats/token"
    assert unique_labels(["/d/web/valid", "/d/code/valid"]) == {
        "/d/web/valid": "web_valid",
        "/d/code/valid": "code_valid",
    }
    assert unique_labels(["/d/valid"]) == {"/d/valid": "valid"} and unique_labels([]) == {}
    assert list(unique_labels(["a", "x/a"]).values()) == ["a", "x_a"]
    assert list(unique_labels(["my data/a:b"]).values()) == ["a_b"]
    assert list(unique_labels(["x y/a", "x_y/a"]).values()) == ["source_0", "source_1"]
