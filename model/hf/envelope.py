"""The vision-language envelope around MiniMax-M3's text model: what servers and transformers load by default.

A text model has no vision tower; in its place stands a small one of zeros, or that of a release.
"""

from typing import Any

# As the released tower's, with one layer and one head of its size.
SMALL_TOWER = {
    "hidden_size": 80,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_channels": 3,
    "image_size": 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
PROJECTOR_SIZE = 80
VISION = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
TEXT_PREFIX = "language_model."


def envelope_config(text: dict[str, Any], release: dict[str, Any] | None) -> dict[str, Any]:
    """config.json around a text_config; vision keys from that of a release, or for the small tower."""
    vision: dict[str, Any] = {
        key: release[key]
        for key in ("vision_config", "projector_hidden_size", "image_token_index", "video_token_index")
        if release and key in release
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "dtype": text["dtype"],
        "vision_config": SMALL_TOWER,
        "projector_hidden_size": PROJECTOR_SIZE,
        # past the vocabulary no text has them
        "image_token_index": text["vocab_size"],
        "video_token_index": text["vocab_size"] + 1,
        **vision,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def small_tower_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the small tower and its projector into a text model of that size."""
    size, wide, projector = SMALL_TOWER["hidden_size"], SMALL_TOWER["intermediate_size"], PROJECTOR_SIZE
    patch = (SMALL_TOWER["temporal_patch_size"], SMALL_TOWER["patch_size"], SMALL_TOWER["patch_size"])
    tower = "vision_tower.vision_model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}embeddings.patch_embedding.weight": (size, SMALL_TOWER["num_channels"], *patch)
    }
    norms = [f"{tower}pre_layrnorm"]  # sic
    linears = {
        "multi_modal_projector.linear_1": (projector, size),
        "multi_modal_projector.linear_2": (hidden_size, projector),
        "patch_merge_mlp.linear_1": (projector, hidden_size * SMALL_TOWER["spatial_merge_size"] ** 2),
        "patch_merge_mlp.linear_2": (hidden_size, projector),
    }
    for layer in range(SMALL_TOWER["num_hidden_layers"]):
        place = f"{tower}encoder.layers.{layer}."
        norms += [f"{place}layer_norm1", f"{place}layer_norm2"]
        linears |= {f"{place}self_attn.{name}": (size, size) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        linears |= {f"{place}mlp.fc1": (wide, size), f"{place}mlp.fc2": (size, wide)}
    for name in norms:
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes
