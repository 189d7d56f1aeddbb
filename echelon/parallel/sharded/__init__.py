"""The form `sharded`: optimizer state, gradients and parameters split over the workers."""
