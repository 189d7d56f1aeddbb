"""A model cut into stages that work on different micro-batches at the same time: one runtime for every schedule."""
