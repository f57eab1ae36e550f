"""Hugging Face checkpoints to training checkpoints and back, tensor by tensor (`scripts/convert.py`)."""
