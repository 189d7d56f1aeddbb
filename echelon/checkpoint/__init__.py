"""Keeping state: tensors by (name, slot) and span, and one tree of plain objects a rank; docs/checkpoints.md."""
