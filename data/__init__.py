"""Data: corpus -> tokenizer -> indexed files -> samples with document borders -> packed micro-batches."""
