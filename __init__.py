"""msa-pretrain: pretraining of sparse-attention (MSA) mixture-of-experts models on megatron-core."""

__version__ = "0.1.0"
