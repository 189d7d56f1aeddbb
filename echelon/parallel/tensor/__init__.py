"""Layers shared by several workers: which are split and how (plan), shown to be right (proof), and split (layers, heads)."""
