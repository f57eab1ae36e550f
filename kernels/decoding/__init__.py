"""Decoding: one query per sequence against a cache."""

from .op import decode_attention

__all__ = ["decode_attention"]
