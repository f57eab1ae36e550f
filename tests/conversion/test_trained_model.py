"""A model trained here, written in MiniMax-M3's format, and what transformers makes of it."""

import json

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.model.hf import ConversionError
from msa_pretrain.scripts.convert import main
from msa_pretrain.training.config import load_config
from msa_pretrain.training.conversion.exporting import ExportChoices, plan_export, run_export
from msa_pretrain.training.conversion.importing import plan_import
from msa_pretrain.training.conversion.logits import hf_logits, loaded_model, logits_of
from msa_pretrain.training.launch import train

M3_SHAPE = [
    "experiment=cpu_smoke",
    "model.num_layers=3",
    "model.hidden_size=32",
    "model.num_query_heads=4",
    "model.head_dim=16",
    "model.rotary_dim=8",
    "model.activation=swiglu_oai",
    "model.mtp_layers=1",
    "attention.block_size=4",
    "attention.top_k=2",
    "attention.index_dim=16",
    "attention.full_layers=[0]",
    "moe.num_experts=4",
    "moe.top_k=2",
    "moe.expert_hidden_size=32",
    "moe.shared_hidden_size=32",
    "moe.routed_scaling=2.0",
    "moe.dense_mlp_layers=[0]",
    "moe.dense_hidden_size=48",
    "training.seq_length=32",
    "training.micro_batch_size=2",
    "training.global_batch_size=2",
    "training.total_tokens=6400",
    "training.warmup_tokens=3200",
    "training.eval_every=0",
    "training.num_threads=1",
    "optim.lr=1e-2",
    "optim.min_lr=1e-3",
    "optim.lr_warmup_tokens=512",
    "tracking.wandb='off'",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoint of a run of 100 steps, sparse in the second half."""
    folder = tmp_path_factory.mktemp("run")
    prepare_builtin_corpus(folder / "data", max_bytes=100_000)
    where = [f"run.dir={folder}", "run.name=tiny", f"data.train=[{folder}/data/train]", "data.valid=[]"]
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        config = load_config(compose("pretrain", [*M3_SHAPE, *where, f"data.cache_dir={folder}/cache"]), world_size=1)
    train(config, overrides=[])
    return folder / "tiny" / "checkpoints" / "step_100"


@pytest.mark.parametrize("envelope", [True, False], ids=["envelope", "text"])
def test_transformers_gives_our_logits(trained, tokens, tmp_path, envelope):
    """The indexer is used: with the local block alone transformers gives other logits."""
    choices = ExportChoices(family="minimax_m3", envelope=envelope, vocab_size=257, max_positions=64)
    folder = run_export(plan_export(trained, choices), tmp_path / "exported")
    prompts = [tokens(length) for length in (7, 8, 9, 64)]
    theirs = list(hf_logits(folder, prompts))
    with loaded_model(trained) as (model, spec):
        for prompt, expected in zip(prompts, theirs, strict=True):
            ours = logits_of(model, spec, prompt)
            assert expected.shape[1] == 257 and ours.shape[1] == 320
            torch.testing.assert_close(ours[:, :257], expected, rtol=0, atol=1e-4)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config["text_config"] if envelope else config)["sparse_attention_config"]["sparse_topk_blocks"] = 1
    path.write_text(json.dumps(config))
    (local_only,) = hf_logits(folder, prompts[-1:])
    assert (local_only - theirs[-1])[8:].abs().max() > 0.01


def test_what_an_export_says_and_holds(trained, tmp_path, capsys):
    options = ["--family", "minimax_m3", "--max-positions", "64", "--vocab-size", "257", "--dtype", "bf16"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "config.json").write_text('{"eos_token_id": 256}')
    options += ["--tokenizer", str(tmp_path / "tokenizer")]
    main(["export", "--from", str(trained), "--to", str(tmp_path / "exported"), *options])
    printed = capsys.readouterr().out
    assert "tensors of MTP layers, which only train, are left out" in printed
    assert (
        "63 rows past the vocabulary of 257 are cut off" in printed and "norm weights w are written as w - 1" in printed
    )
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    wide = {name for name, value in tensors.items() if value.dtype == torch.float32}
    assert wide == {
        f"language_model.model.layers.{n}.block_sparse_moe.{name}"
        for n in (1, 2)
        for name in ("gate.weight", "e_score_correction_bias")
    }
    assert all(value.dtype == torch.bfloat16 for name, value in tensors.items() if name not in wide)
    assert tensors["language_model.lm_head.weight"].shape == (257, 32)
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["text_config"]["eos_token_id"] == 256 and "model_type" not in config["text_config"]
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
    # and the way back gives the model that was trained, with M3's own norms
    model = plan_import(tmp_path / "exported").architecture.model
    assert model.zero_centered_norms and (model.rotary_dim, model.vocab_size) == (8, 257)
    assert plan_import(tmp_path / "exported").architecture.attention.full_layers == [0]


def test_what_a_format_cannot_express_is_listed(trained):
    with pytest.raises(ConversionError) as error:
        plan_export(trained, ExportChoices(family="minimax_m2", max_positions=64))
    assert "the format of minimax_m2 cannot express this model" in str(error.value)
    for problem in (
        "model.qk_norm is per_head; the format has full_vector.",
        "model.activation is swiglu_oai; the format has swiglu.",
        "attention.kind is msa; the format has no index branch. Use minimax_m3.",
        "moe.routed_scaling is 2.0; the format has no such factor.",
        "moe.dense_mlp_layers is [0]; the format has experts in every layer.",
        "moe.shared_hidden_size is 32; the format has no shared expert.",
    ):
        assert problem in error.value.problems
    with pytest.raises(ConversionError, match=r"--vocab-size \(321\) is more than the model's 320 rows"):
        plan_export(trained, ExportChoices(family="minimax_m3", vocab_size=321, max_positions=64))
