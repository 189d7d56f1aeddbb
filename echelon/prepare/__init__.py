"""What scripts hold: models, optimizers, schedulers, scalers and loaders, prepared."""
