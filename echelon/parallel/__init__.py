"""The forms of parallel training: how gradients meet, norms are shared, weights are averaged."""
