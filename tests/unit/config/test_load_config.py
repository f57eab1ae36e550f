"""The door: every problem at once, each with its value and its remedy (field cases 5.2-5.4)."""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from msa_pretrain.model.config import Precision, QKNorm
from msa_pretrain.training import checks
from msa_pretrain.training.config import BlendStage, ConfigError, blend, check_overrides, load_config, to_dict, to_yaml

LONGER = "seq_length:1024,micro_batch_size:1,global_batch_size:4,eval_samples:4"
# (overrides, what the message must say)
BAD = {
    "wrong type": (
        ["training.seq_length=abc"],
        "training.seq_length: Value 'abc' of type 'str' could not be converted",
    ),
    "wrong choice": (["model.qk_norm=perhead"], "model.qk_norm: Invalid value 'perhead', expected one of [none"),
    "unknown key with +": (["+moe.topkk=2"], "unknown key 'moe.topkk'. Did you mean 'moe.top_k'?"),
    "key one level too high": (["+top_k=2"], "unknown key 'top_k'. Did you mean 'attention.top_k' or 'moe.top_k'?"),
    "missing value": (["training.seq_length=???"], "training.seq_length is missing. Set training.seq_length=..."),
    "expert size": (
        ["parallel.expert=3"],
        "parallel.expert (3) must divide moe.num_experts (8). Use 1, 2, 4 or 8.",
    ),
    "pipeline size": (
        ["parallel.pipeline=5"],
        "parallel.pipeline x parallel.virtual_pipeline (5) must divide model.num_layers (4)",
    ),
    "world size": (
        ["parallel.expert=2"],
        "parallel.pipeline x parallel.expert x parallel.expert_tensor (2) must divide the number of processes (1).",
    ),
    "virtual stages alone": (["parallel.virtual_pipeline=2"], "parallel.virtual_pipeline (2) needs parallel.pipeline"),
    "context chunks": (
        ["parallel.context=3", "training.micro_batch_size=1"],
        "training.micro_batch_size x training.seq_length (512) must be a multiple of 2 x parallel.context, which "
        "takes 6. Use training.seq_length=516.",
    ),
    "tensor size and KV heads": (
        ["parallel.tensor=4", "parallel.sequence=true"],
        "parallel.tensor (4) must divide model.num_kv_heads (2): a rank has whole KV groups. Use 1 or 2.",
    ),
    "tensor size and world size": (
        ["parallel.tensor=2", "parallel.sequence=true"],
        "parallel.tensor x parallel.context x parallel.pipeline (2) must divide the number of processes (1). Use a "
        "product out of 1",
    ),
    "tensor size and vocabulary": (
        ["parallel.tensor=2", "parallel.sequence=true", "model.vocab_size=257"],
        "model.vocab_size (257) must be a multiple of parallel.tensor (2). Use 258.",
    ),
    "tensor size and dense MLP": (
        ["parallel.tensor=2", "parallel.sequence=true", "moe.dense_hidden_size=101"],
        "moe.dense_hidden_size (101) must be a multiple of parallel.tensor (2). Use 100 or 102.",
    ),
    "tensor size and shared expert": (
        ["parallel.tensor=2", "parallel.sequence=true", "moe.shared_hidden_size=1"],
        "moe.shared_hidden_size (1) must be a multiple of parallel.tensor (2). Use 2.",
    ),
    "tensor size with MoE alone": (
        ["parallel.tensor=2"],
        "parallel.tensor (2) with MoE layers needs parallel.sequence: every rank would route every token. Set "
        "parallel.sequence=true.",
    ),
    "sequence alone": (["parallel.sequence=true"], "parallel.sequence has no effect without tensor parallelism."),
    "sequence and tokens": (
        ["parallel.tensor=2", "parallel.sequence=true", "training.seq_length=511", "training.micro_batch_size=1"],
        "training.micro_batch_size x training.seq_length (511) must be a multiple of parallel.tensor, which takes 2. "
        "Use training.seq_length=512.",
    ),
    "expert tensor size": (
        ["parallel.expert_tensor=2"],
        "parallel.expert_tensor (2) must be 1 or parallel.tensor (1). Use 1.",
    ),
    "expert tensor size and channels": (
        ["parallel.tensor=2", "parallel.sequence=true", "parallel.expert_tensor=2", "moe.expert_hidden_size=101"],
        "parallel.expert_tensor (2) must divide moe.expert_hidden_size (101). Use 1.",
    ),
    "experts without MoE layers": (
        ["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2", "moe.dense_mlp_layers=[0,1,2,3]"],
        "parallel.expert (2) has no effect without MoE layers. Set parallel.expert=1.",
    ),
    "MTP and tensor size": (
        ["parallel.tensor=2", "parallel.sequence=true", "model.mtp_layers=1", "model.hidden_size=127"],
        "model.hidden_size (127) must be a multiple of parallel.tensor (2) with model.mtp_layers. Use 126 or 128.",
    ),
    "k below one": (["attention.top_k=0"], "attention.top_k (0) must be at least 1."),
    "block size zero": (["attention.block_size=0"], "attention.block_size (0) must be at least 1."),
    "no room for the local block": (
        ["attention.top_k=2", "attention.init_blocks=2"],
        "Raise attention.top_k to 3 or more.",
    ),
    "warm-up longer than the run": (
        ["training.warmup_tokens=491_522"],
        "training.warmup_tokens (491522) is longer than the run, training.total_tokens (491520).",
    ),
    "tokens not a multiple": (
        ["training.total_tokens=491_521", "training.warmup_tokens=0"],
        "training.total_tokens (491521) must be a multiple of the tokens of a step, global_batch_size x seq_length "
        "(2048). Use 493568.",
    ),
    "heads": (
        ["model.num_kv_heads=3"],
        "model.num_kv_heads (3) must divide model.num_query_heads (8). Use 1, 2, 4 or 8.",
    ),
    "odd rotary": (["model.rotary_dim=15"], "model.rotary_dim (15) must be even and at most model.head_dim (32)."),
    "rotary over index": (["attention.index_dim=8"], "attention.index_dim (8) must be at least model.rotary_dim (16)"),
    "no length of the first training": (
        ["model.rope_scaling.original_length=0"],
        "model.rope_scaling (factor 1.0, low_freq_factor 1.0, high_freq_factor 4.0, original_length 0) needs a factor",
    ),
    "faster rotation": (["model.rope_scaling.factor=0.5"], "model.rope_scaling (factor 0.5, low_freq_factor 1.0,"),
    "crossed frequencies": (["model.rope_scaling.low_freq_factor=4"], "low_freq_factor 4.0, high_freq_factor 4.0,"),
    "zero-centred full-vector norms": (
        ["model.zero_centered_norms=true", "model.qk_norm=full_vector"],
        "model.zero_centered_norms=true has no form for model.qk_norm=full_vector. Use per_head or none.",
    ),
    "softmax with a bias": (
        ["moe.score_function=softmax"],
        "moe.bias_update_rate (0.001) is a step for sigmoid scores, far too large for moe.score_function=softmax",
    ),
    "layer out of range": (
        ["attention.full_layers=[4]"],
        "attention.full_layers names layers [4], but layers run from 0",
    ),
    "layer twice": (["attention.full_layers=[1,1]"], "attention.full_layers ([1, 1]) names a layer twice."),
    "every layer full": (["attention.full_layers=[0,1,2,3]"], "attention.full_layers names every layer."),
    "dense with a warm-up": (["attention=dense"], "training.warmup_tokens (307200) has no effect with attention.kind"),
    "more experts than there are": (["moe.top_k=9"], "moe.top_k (9) must be at most moe.num_experts (8)."),
    "groups that do not divide": (
        ["moe.num_groups=3"],
        "moe.num_groups (3) must divide moe.num_experts (8). Use 1, 2, 4 or 8.",
    ),
    "more groups than there are": (["moe.top_groups=2"], "moe.top_groups (2) must be at most moe.num_groups (1)."),
    "groups against k": (
        ["moe.num_groups=4", "moe.top_groups=4"],
        "moe.top_groups (4) must divide moe.top_k (2): a group is worth its top_k / top_groups best experts. Use",
    ),
    "groups too small": (
        ["moe.num_groups=8", "moe.top_groups=1"],
        "moe.top_groups (1) leaves 1 experts open to a token, fewer than moe.top_k (2). Raise moe.top_groups.",
    ),
    "losses of a forced balance": (
        ["moe.force_balance=true", "moe.aux_loss_coef=0.1"],
        "moe.aux_loss_coef (0.1) and moe.z_loss_coef (0.0) have no meaning with moe.force_balance=true",
    ),
    "negative loss": (["moe.z_loss_coef=-1"], "moe.z_loss_coef (-1.0) must be at least 0."),
    "dense MLP without size": (["moe.dense_hidden_size=0"], "moe.dense_hidden_size (0) and moe.dense_mlp_layers ([0])"),
    "batch size": (
        ["training.global_batch_size=6", "training.total_tokens=3_072_000"],
        "training.global_batch_size (6) must be a multiple of micro_batch_size x data-parallel size (4 x 1). Use 4 or "
        "8.",
    ),
    "ramp of two": (["training.batch_ramp=[1,2]"], "training.batch_ramp ([1, 2]) must be three numbers above 0"),
    "ramp that misses": (
        ["training.batch_ramp=[1,2,8]"],
        "training.batch_ramp ([1, 2, 8]) must grow from 1 in steps of 2 to training.global_batch_size (4) exactly.",
    ),
    "ramp of odd sizes": (
        ["training.batch_ramp=[2,2,8]", "training.micro_batch_size=4"],
        "training.batch_ramp: start and increment [2, 2] must be multiples of micro_batch_size x data-parallel size",
    ),
    "lengths that shrink": (
        ["training.length_schedule=[{from_tokens:20480,seq_length:256,micro_batch_size:1,global_batch_size:4}]"],
        "training.length_schedule[0].seq_length (256) must be above that of the stage before (512).",
    ),
    "lengths out of order": (
        [
            "training.length_schedule=[{from_tokens:20480,seq_length:1024,micro_batch_size:1,global_batch_size:4},"
            "{from_tokens:20480,seq_length:2048,micro_batch_size:1,global_batch_size:4}]"
        ],
        "training.length_schedule[1].from_tokens (20480) must be above 20480 and below training.total_tokens (491520).",
    ),
    "length behind the end": (
        ["training.length_schedule=[{from_tokens:491520,seq_length:1024,micro_batch_size:1,global_batch_size:4}]"],
        "training.length_schedule[0].from_tokens (491520) must be above 0 and below training.total_tokens (491520).",
    ),
    "empty batch of a length": (
        ["training.length_schedule=[{from_tokens:20480,seq_length:1024,micro_batch_size:0,global_batch_size:4}]"],
        "training.length_schedule[0].micro_batch_size (0) must be at least 1.",
    ),
    "length that is not validated": (
        ["training.length_schedule=[{from_tokens:20480,seq_length:1024,micro_batch_size:1,global_batch_size:4}]"],
        "training.length_schedule[0].eval_samples (0) must be at least 1 with training.eval_every above 0.",
    ),
    "length within a step": (
        [f"training.length_schedule=[{{from_tokens:20481,{LONGER}}}]"],
        "training.length_schedule[0].from_tokens (20481) must be a multiple of the tokens of a step, global_batch_size "
        "x seq_length (2048). Use 22528.",
    ),
    "end within a longer step": (
        [f"training.length_schedule=[{{from_tokens:22528,{LONGER}}}]"],
        "training.total_tokens (491520) must be a multiple of the tokens of a step, global_batch_size x seq_length "
        "(4096) behind training.length_schedule[0].from_tokens (22528). Use 493568.",
    ),
    "ramp beyond a length": (
        [
            f"training.length_schedule=[{{from_tokens:20480,{LONGER}}}]",
            "training.micro_batch_size=1",
            "training.batch_ramp=[1,1,41]",
        ],
        "training.batch_ramp ([1, 1, 41]) must end before training.length_schedule[0], which begins after 40 samples.",
    ),
    "batch of a length": (
        [
            "training.length_schedule=[{from_tokens:20480,seq_length:1024,micro_batch_size:3,global_batch_size:4,"
            "eval_samples:3}]"
        ],
        "training.length_schedule[0]: training.global_batch_size (4) must be a multiple of micro_batch_size x "
        "data-parallel size (3 x 1).",
    ),
    "layout of a length": (
        [
            "parallel.context=2",
            "training.length_schedule=[{from_tokens:20480,seq_length:1023,micro_batch_size:1,global_batch_size:4,"
            "eval_samples:4}]",
        ],
        "training.length_schedule[0]: training.micro_batch_size x training.seq_length (1023) must be a multiple of 2 x "
        "parallel.context, which takes 4. Use training.seq_length=1024.",
    ),
    "blend within a longer sample": (
        [
            f"training.length_schedule=[{{from_tokens:20480,{LONGER}}}]",
            "data.train_schedule=[{from_tokens:20992,blend:[a]}]",
        ],
        "data.train_schedule[0].from_tokens (20992) must be a multiple of training.length_schedule[0].seq_length "
        "(1024) behind training.length_schedule[0].from_tokens (20480) above 0 and below training.total_tokens "
        "(491520).",
    ),
    "learning rates": (["optim.min_lr=1"], "optim.min_lr (1.0) must be at most optim.lr (0.002)."),
    "wsd without decay": (["optim.schedule=wsd"], "optim.wsd_decay_tokens (0) must be above 0"),
    "cosine with decay": (["optim.wsd_decay_tokens=5"], "optim.wsd_decay_tokens (5) has no effect with optim.schedule"),
    "betas": (["optim.betas=[0.9,1.0]"], "optim.betas ([0.9, 1.0]) must be two numbers from 0 to below 1."),
    "negative decay": (["optim.weight_decay=-1"], "optim.weight_decay (-1.0) must be at least 0."),
    "zero learning rate": (["optim.lr=0"], "optim.lr (0.0) must be above 0."),
    "evaluation without samples": (["training.eval_samples=0"], "training.eval_every (40) needs training.eval_samples"),
    "share": (
        ["data.train=[/data/web:lots]"],
        "data.train: the share in '/data/web:lots' must be a number above 0, as",
    ),
    "zero share": (["data.train=[/data/web:0]"], "data.train: the share in '/data/web:0' must be a number above 0, as"),
    "stage that begins within a sample": (
        ["data.train_schedule=[{from_tokens:513,blend:[a]}]"],
        "data.train_schedule[0].from_tokens (513) must be a multiple of training.seq_length (512) above 0 and below",
    ),
    "stages out of order": (
        ["data.train_schedule=[{from_tokens:1024,blend:[a]},{from_tokens:512,blend:[a]}]"],
        "data.train_schedule[1].from_tokens (512) must be a multiple of training.seq_length (512) above 1024 and below",
    ),
    "stage without a blend": (
        ["data.train_schedule=[{from_tokens:512,blend:[]}]"],
        "data.train_schedule[0].blend is empty. Name a blend as in data.train.",
    ),
    "share of a stage": (
        ["data.train_schedule=[{from_tokens:512,blend:['a:x']}]"],
        "data.train_schedule[0].blend: the share in 'a:x' must be a number above 0",
    ),
    "source twice": (["data.valid=[a/b:1,./a/b:2]"], "data.valid (['a/b:1', './a/b:2']) names a source twice."),
    "test without samples": (
        ["data.test=[a]", "training.eval_samples=0", "training.eval_every=0"],
        "data.test (['a']) has no effect with training.eval_samples=0. Set it above 0.",
    ),
    "dropping without best fit": (
        ["data.long_documents=drop"],
        "data.long_documents (drop) has no effect with data.packing=concat",
    ),
    "run name": (["run.name=a/b"], "run.name ('a/b') must be letters, digits"),
    "resume": (
        ["training.resume=nowhere"],
        "training.resume (nowhere) is neither auto, none, nor a checkpoint folder.",
    ),
    "two sources of weights": (
        ["training.init_from=tests", "training.resume=tests"],
        "training.init_from (tests) has no effect beside training.resume (tests), which brings all weights.",
    ),
    "an optimizer from nowhere": (
        ["training.init_optimizer=keep"],
        "training.init_optimizer=keep needs a checkpoint to keep it from. Set training.init_from, or use reset.",
    ),
    "index from no attention": (
        ["attention.indexer_init=from_attention"],
        "attention.indexer_init=from_attention needs trained attention. Set training.init_from, or use random.",
    ),
    "index of another width": (
        ["attention.indexer_init=from_attention", "attention.index_dim=16", "training.init_from=tests"],
        "attention.indexer_init=from_attention needs attention.index_dim (16) equal to model.head_dim (32).",
    ),
    "index of a dense model": (
        ["attention.kind=dense", "attention.indexer_init=from_attention", "training.init_from=tests"],
        "attention.indexer_init=from_attention has no effect with attention.kind=dense, which has no indexer.",
    ),
    "triton sizes": (
        ["attention.backend=triton", "attention.block_size=24"],
        "attention.block_size (24) must be 16, 32, 64 or 128 with attention.backend=triton.",
    ),
    "triton top-k": (
        ["attention.backend=triton", "attention.top_k=33"],
        "attention.top_k (33) must be at most 32 with attention.backend=triton.",
    ),
    "triton heads": (
        ["attention.backend=triton", "model.num_query_heads=34"],
        "model.num_query_heads / model.num_kv_heads (17) must be at most 16 with attention.backend=triton.",
    ),
    "norms of a backend": (
        ["model.backend=transformer_engine", "model.zero_centered_norms=true", "training.precision=bf16"],
        "model.zero_centered_norms=true has no form in model.backend=transformer_engine. Use torch.",
    ),
    "backend": (
        ["model.backend=transformer_engine"],
        "training.precision (fp32) is not what model.backend=transformer_engine",
    ),
}


@pytest.mark.parametrize("overrides, message", BAD.values(), ids=BAD)
def test_bad_configuration(config_of, overrides, message):
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_missing_data_names_the_file_and_the_command(config_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        config_of(dry_run=False)
    assert (
        "data.train: runs/data/builtin/train.idx does not exist. Prepare it with `python -m "
        "msa_pretrain.scripts.prepare_data`, or correct the prefix." in caught.value.problems
    )
    with pytest.raises(ConfigError, match=r"data.train is empty. Name at least one prepared dataset"):
        config_of("data=indexed", dry_run=False)


def test_weights_from_nowhere_are_refused_unless_nothing_is_loaded(config_of):
    assert config_of("training.init_from=nowhere").training.init_from == "nowhere"
    with pytest.raises(
        ConfigError, match=r"training.init_from \(nowhere\) is not a folder\. Name a checkpoint or a folder"
    ):
        config_of("training.init_from=nowhere", dry_run=False)


def test_all_problems_come_at_once(config_of):
    with pytest.raises(ConfigError) as caught:
        config_of("parallel.expert=3", "moe.top_k=9", "optim.min_lr=1", "run.name=a/b")
    assert len(caught.value.problems) == 5  # expert also fails to divide the one process


@pytest.mark.parametrize("override", ["model.topk_blokcs=8", "+model.topk_blokcs=8", "++model.topk_blokcs=8"])
def test_typos_on_the_command_line_are_refused_before_hydra_suggests_a_plus(override):
    with pytest.raises(ConfigError, match=r"unknown key 'model.topk_blokcs'\."):
        check_overrides(["experiment=cpu_smoke", override])
    check_overrides(["experiment=cpu_smoke", "model=smoke", "attention.top_k=4", "hydra.verbose=true", "--cfg", "job"])


def test_token_budgets_keep_their_digits(config_of):
    config = config_of("training.warmup_tokens=40_000_000_000", experiment="msa_pt_230b", world_size=None)
    assert config.training.warmup_tokens == 40_000_000_000
    with pytest.raises(ConfigError, match=r"training.warmup_tokens: Value '40000000000.0' of type 'float'"):
        config_of("training.warmup_tokens=40e9", experiment="msa_pt_230b", world_size=None)


@pytest.mark.parametrize("name", ["12e5", "1_000"])
def test_names_that_look_like_numbers_stay_text(config_of, name):
    assert config_of(f"run.name='{name}'").run.name == name


def test_the_saved_config_is_resolved(monkeypatch):
    monkeypatch.setenv("MSA_TEST_NAME", "first")
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        cfg = compose("pretrain", ["experiment=cpu_smoke", "dry_run=true", "run.name=${oc.env:MSA_TEST_NAME}"])
    config = load_config(cfg, world_size=1)
    monkeypatch.setenv("MSA_TEST_NAME", "second")
    saved = OmegaConf.create(to_yaml(to_dict(config)))
    assert saved.run.name == "first"


def test_saved_yaml_loads_back_to_the_same_config(config_of):
    config = config_of()
    again = load_config(OmegaConf.create(to_yaml(to_dict(config))), world_size=1)
    assert again == config
    assert again.training.precision is Precision.fp32 and again.model.qk_norm is QKNorm.per_head


def test_blends_are_lists_so_that_the_command_line_replaces_them(config_of):
    config = config_of("data.train=[/data/web:0.9,/data/code:.1]", "data.valid=[/data/held_out]")
    assert blend(config.data.train) == {"/data/web": 0.9, "/data/code": 0.1}
    assert blend(config.data.valid) == {"/data/held_out": 1.0}


def test_later_blends_are_typed(config_of):
    config = config_of("data.train_schedule=[{from_tokens:5120,blend:[/data/web:2,/data/code]}]")
    assert config.data.train_schedule == [BlendStage(from_tokens=5120, blend=["/data/web:2", "/data/code"])]
    assert load_config(OmegaConf.create(to_yaml(to_dict(config))), world_size=1) == config
    for bad in ("[{from_tokens:5120,blnd:[/data/web]}]", "[{from_tokens:many,blend:[/data/web]}]", "[5120]"):
        with pytest.raises(ConfigError, match=r"data\.train_schedule"):
            config_of(f"data.train_schedule={bad}")
    with pytest.raises(ConfigError, match=r"data\.train_schedule\[0\]\.blend is missing"):
        config_of("data.train_schedule=[{from_tokens:5120}]")


def test_a_ramped_batch_grows_by_samples_and_feeds_every_token(config_of):
    config = config_of("training.batch_ramp=[1,1,12]", "training.micro_batch_size=1")
    sizes, consumed = [], 0
    while consumed < config.total_samples:
        sizes.append(config.batch_size_at(consumed))
        consumed += sizes[-1]
    # 12 samples for the three increments: 4 samples each
    assert sizes[:4] == [1] * 4 and sizes[4:6] == [2] * 2 and sizes[6:8] == [3] * 2 and sizes[8] == 4
    assert consumed == config.total_samples == 960 and len(sizes) == config.total_steps


def test_stages_of_growing_samples(config_of):
    """8 steps of 4 x 512 tokens with a ramp before them, 9 of 4 x 1024, the rest of 2 x 4096: 8K, ... in miniature."""
    stages = (
        "training.length_schedule=[{from_tokens:20480,seq_length:1024,micro_batch_size:2,global_batch_size:4,"
        "eval_samples:4},{from_tokens:57344,seq_length:4096,micro_batch_size:1,global_batch_size:2,eval_samples:2}]"
    )
    config = config_of(stages, "training.batch_ramp=[1,1,12]", "training.micro_batch_size=1")
    consumed = tokens = steps = 0
    seen = []
    while consumed < config.total_samples:
        stage, size = config.stage_at(consumed), config.batch_size_at(consumed)
        assert config.samples_at(tokens) == consumed and config.steps_until(tokens) == steps
        assert size % stage.micro_batch_size == 0
        seen.append((tokens, size, stage.seq_length))
        consumed, tokens, steps = consumed + size, tokens + size * stage.seq_length, steps + 1
    assert tokens == config.training.total_tokens and steps == config.total_steps
    assert [size for _, size, length in seen if length == 512][:9] == [1] * 4 + [2] * 2 + [3] * 2 + [4]
    assert next(at for at, _, length in seen if length == 1024) == 20480
    assert next(at for at, _, length in seen if length == 4096) == 57344
    assert {size for _, size, length in seen if length == 4096} == {2}
    assert config.total_samples == 40 + 36 + (491520 - 57344) // 4096 == consumed
    assert load_config(OmegaConf.create(to_yaml(to_dict(config))), world_size=1) == config


def test_triton_limits_are_those_of_the_kernels():
    from msa_pretrain.kernels.block_selection import launch as selection
    from msa_pretrain.kernels.block_sparse_attention import launch_support as attention
    from msa_pretrain.kernels.indexer_loss import dense_launch as dense_kl

    sizes = {
        selection.INDEX_DIMS,
        selection.BLOCK_SIZES,
        attention.SUPPORTED_SIZES,
        dense_kl.INDEX_DIMS,
        dense_kl.HEAD_DIMS,
    }
    assert sizes == {checks.TRITON_SIZES}
    assert {max(selection.NUM_SELECTED), max(attention.NUM_SELECTED)} == {checks.TRITON_MAX_TOP_K}
    assert {max(attention.HEADS_PER_GROUP), max(dense_kl.HEADS_PER_GROUP)} == {checks.TRITON_MAX_HEADS_PER_GROUP}


def test_layout_checks_need_the_world_size(config_of):
    config = config_of("parallel.expert=2", world_size=None)
    assert config.parallel.expert == 2
    assert config_of("parallel.expert=2", "training.micro_batch_size=2", world_size=2) is not None


def test_worlds_of_tensor_and_expert_parallelism_need_not_be_products(config_of):
    """Experts are spread over tensor ranks as well: two processes are enough for TP=2 and EP=2."""
    layout = ["parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2"]
    parallel = config_of(*layout, world_size=2).parallel
    assert (parallel.smallest_world, parallel.data_parallel(2)) == (2, 1)
    parallel = config_of(*layout, "parallel.pipeline=2", world_size=None).parallel
    assert (parallel.model_ranks, parallel.expert_ranks, parallel.smallest_world) == (4, 4, 4)
    assert config_of(*layout, "parallel.expert=8", world_size=None).parallel.smallest_world == 8
    with pytest.raises(ConfigError, match=r"parallel.expert x parallel.expert_tensor \(4\) must divide the number"):
        config_of(*layout, "parallel.expert_tensor=2", world_size=2)


def test_tensor_parallelism_without_moe_layers_needs_no_sequence_parallelism(config_of):
    config = config_of("parallel.tensor=2", "moe.dense_mlp_layers=[0,1,2,3]", world_size=2)
    assert not config.parallel.sequence


def test_other_numbers_of_processes_are_named(config_of):
    with pytest.raises(ConfigError, match=r"Use a product out of 1 or 3, or start 2 or 4 processes\."):
        config_of("parallel.pipeline=2", world_size=3)


def test_virtual_stages_take_micro_batches_in_rounds(config_of):
    """Of a step, of its ramp and of validation, whose schedule is the same."""
    layout = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "training.micro_batch_size=1"]
    config_of(*layout, "training.batch_ramp=[2,2,8]", world_size=2)
    unit = "micro_batch_size x data-parallel size x parallel.pipeline, with virtual stages, (1 x 1 x 2)"
    with pytest.raises(ConfigError) as caught:
        config_of(*layout, "training.batch_ramp=[1,1,8]", "training.eval_samples=15", world_size=2)
    assert caught.value.problems == [
        f"training.eval_samples (15) must be a multiple of {unit}. Use 14 or 16.",
        f"training.batch_ramp: start and increment [1, 1] must be multiples of {unit}.",
    ]
    with pytest.raises(ConfigError) as caught:
        config_of(*layout, "training.global_batch_size=5", "training.total_tokens=512000", world_size=2)
    assert caught.value.problems == [f"training.global_batch_size (5) must be a multiple of {unit}. Use 4 or 6."]
