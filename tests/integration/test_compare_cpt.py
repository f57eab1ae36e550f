"""MSA-CPT against the dense continuation of the same checkpoint, on the same data with the same schedule."""

import pytest

from msa_pretrain.scripts import compare_cpt


def records(kl, loss):
    measures = {name: kl for name in compare_cpt.MEASURES}
    first = {"step": 0, "lm_loss": 2 * loss, **measures}
    return [first, {"step": 80, "lm_loss": loss, "lm_loss_sparse": loss, **measures}]


def test_the_table_of_a_comparison():
    runs = {"dense": {"1": [{"step": 0, "lm_loss": 9.0}, {"step": 80, "lm_loss": 2.0}]}}
    runs |= {"random": {"1": records(0.5, 2.01)}, "from_attention": {"1": records(0.25, 1.99)}}
    lines = compare_cpt.table({"seeds": [1], "runs": runs}).splitlines()
    assert "| random | 2.0100 | 2.0100 | +0.50% |" in lines and "| from_attention | 1.9900 | 1.9900 | -0.50% |" in lines
    assert f"| 80 (sparse from here) | from_attention |{' 0.250 |' * 6}" in lines
    assert compare_cpt.spread([1.0, 3.0]) == "2.000 (1.000 to 3.000)"


@pytest.mark.slow
def test_sparse_continuations_end_where_the_dense_one_does(tmp_path):
    """The loss within 1%, and an index that has learned: its KL falls and it recalls more than chance."""
    results = compare_cpt.compare(tmp_path, [1])
    print(compare_cpt.table(results))
    dense = results["runs"]["dense"]["1"][-1]["lm_loss"]
    for variant in ("random", "from_attention"):
        first, *_, last = results["runs"][variant]["1"]
        assert abs(last["lm_loss"] / dense - 1) < 0.01
        assert last["kl"] < 0.5 * first["kl"] and last["score_recall_skill"] > 0.2
