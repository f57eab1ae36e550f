"""The layouts and cuts that the walker goes through."""

P = "parallel."
TP2 = [P + "tensor=2", P + "sequence=true"]
PP2 = [P + "pipeline=2"]
VPP2 = [*PP2, P + "virtual_pipeline=2"]
LAYOUTS = {
    "dp2": [],
    "ep2_alltoall": [P + "expert=2"],
    "ep2_allgather": [P + "expert=2", P + "dispatcher=allgather"],
    "pp2": PP2,
    "pp2_vpp2": VPP2,
    "tp2": TP2,
    "tp2_ep2_recompute": [*TP2, P + "expert=2", "training.recompute=full"],
    "tp2_etp2_allgather": [*TP2, P + "expert_tensor=2", P + "dispatcher=allgather"],
    "cp2": [P + "context=2"],
    "cp2_ep2_recompute": [P + "context=2", P + "expert=2", "training.recompute=full"],
}
# Combinations, and with them the jobs of four processes, are left to `make parity`.
PAIRS = ["tp2_ep2_recompute", "tp2_etp2_allgather", "cp2_ep2_recompute"]
# Ranks work on one sample together.
SHARED_SAMPLES = [name for name in LAYOUTS if name.startswith(("tp2", "cp2"))]
OFTEN = "tracking.recall_every=2"
# Other models, trained by one process and in the layouts below. With two pipeline stages the first, or the last, has no
# MSA and no MoE layer; with virtual stages, the first chunk or the second of either stage, or both chunks of the first.
VARIANTS = {
    "late_msa": [
        "attention.full_layers=[0,1]",
        "moe.dense_mlp_layers=[0,1]",
        "attention.detach=false",
        "model.qk_norm=full_vector",
        "model.tie_embeddings=true",
        "moe.shared_hidden_size=8",
        OFTEN,
    ],
    "early_msa": [
        "attention.full_layers=[2,3]",
        "moe.dense_mlp_layers=[2,3]",
        "attention.detach=false",
        OFTEN,
    ],
    "odd_msa": ["attention.full_layers=[0,2]", "moe.dense_mlp_layers=[0,2]", OFTEN],
    "no_moe": ["attention.full_layers=[2,3]", "moe.dense_mlp_layers=[0,1,2,3]", "attention.detach=false", OFTEN],
}
# name -> (variant, overrides)
VARIANT_LAYOUTS = {
    "late_msa_pp2": ("late_msa", PP2),
    "late_msa_vpp2": ("late_msa", VPP2),
    "late_msa_tp2": ("late_msa", TP2),
    "early_msa_pp2": ("early_msa", PP2),
    "early_msa_vpp2": ("early_msa", VPP2),
    "odd_msa_vpp2": ("odd_msa", VPP2),
    "no_moe_tp2_without_sp": ("no_moe", [P + "tensor=2"]),
    "no_moe_pp2": ("no_moe", PP2),
    "late_msa_cp2": ("late_msa", [P + "context=2"]),
}
FOUR_PROCESSES = {
    "late_msa_tp2_pp2": ("late_msa", [*TP2, *PP2]),
    "late_msa_tp2_ep2_dp2": ("late_msa", [*TP2, P + "expert=2"]),
    "late_msa_tp2_cp2": ("late_msa", [*TP2, P + "context=2"]),
}
ALONE = {
    "micro_batch_2": ["training.micro_batch_size=2"],
    "full_recompute": ["training.recompute=full"],
}
# A first stage without MSA or MoE layers, and one embedding that both stages have.
TIED = ["model.tie_embeddings=true", "attention.full_layers=[0,1]", "moe.dense_mlp_layers=[0,1]"]
RESUMED = {
    "dp2": [],
    "pp2": PP2,
    "tied_pp2": [*TIED, *PP2],
    "ep2": LAYOUTS["ep2_alltoall"],
    "tp2": LAYOUTS["tp2_etp2_allgather"],
}
# A dense run, and what continues from its checkpoint as MSA: name -> (processes, overrides); fp32 beside bf16.
DENSE = ["attention.kind=dense", "training.precision=bf16", *PP2]
CONTINUED = {
    "dense_to_one": (1, ["training.precision=bf16"]),
    "dense_to_vpp2": (2, [*VPP2, "training.precision=bf16"]),
    "dense_to_dp2": (2, ["training.precision=fp32"]),
}
KEEP = ["training.init_optimizer=keep", "attention.indexer_init=from_attention", "attention.index_dim=8"]
# compared with one process that has them too
MTP = ["model.mtp_layers=2"]
MTP_LAYOUTS = {
    "mtp_pp2": [*MTP, *LAYOUTS["pp2"]],
    "mtp_ep2": [*MTP, *LAYOUTS["ep2_alltoall"]],
    "mtp_tp2": [*MTP, *TP2],
    "mtp_cp2": [*MTP, P + "context=2"],
}
# Adam's first moment is then the gradient of the last step, as the optimizer got it.
EXACT = ["optim.lr_warmup_tokens=0", "optim.betas=[0.0,0.95]", "optim.clip_norm=1e9", "optim.indexer_clip_norm=1e9"]
# Five documents one by one, in one row, and in one row with padding: lengths by micro-batch, below 0 of padding.
ROW = [
    "training.seq_length=272",
    "training.global_batch_size=1",
    "training.total_tokens=544",
    "training.warmup_tokens=272",
    "attention.block_size=16",
    "attention.top_k=4",
]
DOCUMENTS = {
    "alone": [[1], [3], [7], [128], [129]],
    "packed": [[1, 3, 7, 128, 129]],
    "padded": [[1, -5, 3, 7, -2, 128, 129, -9]],
}
# Two context-parallel ranks need multiples of four tokens. The second has nothing but padding in the first row.
CONTEXT_DOCUMENTS = {
    "alone_cp2": [[1, -3], [3, -1], [7, -1], [128], [129, -3]],
    "packed_cp2": [[1, 3, 7, 128, 129, -4]],
}
# name -> (warm-up steps, step of the checkpoint): inside the warm-up, exactly at the switch, before the first step
CUTS = {"inside_warmup": (7, 5), "at_the_switch": (5, 5), "at_step_0": (5, 0)}
# the batch grows 2, 3, 4 within the first 8 samples, so the token budget of the warm-up falls inside a step
RAMP = ["training.batch_ramp=[2,1,8]"]
# after five steps the samples grow: two of 40 tokens in place of four of 20
LENGTHS = ["training.length_schedule=[{from_tokens:400,seq_length:40,micro_batch_size:1,global_batch_size:2}]"]
