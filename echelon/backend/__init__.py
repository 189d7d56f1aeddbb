"""Our groups as a process group of torch.distributed: see docs/torch-backend.md."""
