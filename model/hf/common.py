"""What the families share: keys that all of them call the same."""

from typing import Any

from ..config import AttentionBackend, AttentionConfig, AttentionKind, LayerBackend, ModelConfig, ModelSpec
from .config_reader import ConfigReader
from .family import ExportOptions


def read_model(reader: ConfigReader, **values: Any) -> ModelConfig:
    """What all families call by the same keys; `values` are fields of ModelConfig."""
    return ModelConfig(
        num_layers=reader.need("num_hidden_layers"),
        hidden_size=reader.need("hidden_size"),
        num_query_heads=reader.need("num_attention_heads"),
        num_kv_heads=reader.get("num_key_value_heads", reader.need("num_attention_heads")),
        vocab_size=reader.need("vocab_size"),
        norm_eps=float(reader.need("rms_norm_eps")),
        tie_embeddings=reader.get("tie_word_embeddings", False),
        backend=LayerBackend.torch,
        **values,
    )


def dense_attention() -> AttentionConfig:
    return AttentionConfig(kind=AttentionKind.dense, backend=AttentionBackend.reference)


def write_common(spec: ModelSpec, options: ExportOptions) -> dict[str, Any]:
    """Keys that all families share."""
    model = spec.model
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_query_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": options.vocab_size,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": options.max_positions,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "dtype": options.dtype,
        **{key: options.token_ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
