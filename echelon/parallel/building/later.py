"""A recorded model whose parameters are made once it is known which of them a rank keeps: a pipeline's cut is found with the first batch.

Until then they are placeholders in the same Python objects: shapes, no memory, NaN for whoever reads them. Buffers are made at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.parallel.building.recipe import Recipe, placeholder, put, recorder_of, tensors
from echelon.parallel.building.tape import give_back


class Later:
    """What a model still has to be given."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Takes the recording out of the model; all but its recorded parameters goes to the device."""
        found, recorded = dict(tensors(model)), {}
        with torch.no_grad():
            for name, tensor in found.items():
                recorder = recorder_of(tensor)
                if recorder is None:
                    tensor.data = tensor.data.to(device)
                elif isinstance(tensor, nn.Parameter):
                    recorded[name] = tensor.detach()
                    put(model, tensor, placeholder(tensor).to(device).expand(tensor.shape))
                else:
                    put(model, tensor, recorder.values([tensor])[0].to(device))
        self.device, self.recipe = device, Recipe(recorded)
        self.waiting = {name: found[name] for name in recorded}

    @torch.no_grad()
    def make(self, here: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """Makes the tensors of which `here` is true, one after the other; the others stay placeholders for good."""
        wanted = {name: tensor for name, tensor in self.waiting.items() if here(tensor)}
        for name, value in self.recipe.all(wanted.__contains__):
            wanted[name].data = value.to(self.device)
        self.waiting = {}
        give_back(self.recipe.largest)
