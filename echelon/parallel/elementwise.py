"""Which optimizers step each element by itself, so that a piece of a parameter may be stepped without the rest: pure but for names."""

from __future__ import annotations

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
    "SparseAdam",
)
WHOLE = {
    "LBFGS": "its step is a product over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it keeps means of whole rows and columns",
}


def looks_at_whole(name: str, module: str) -> str:
    """Why an optimizer of this class needs whole parameters; "" if it does not, or nobody knows."""
    return WHOLE.get(name, "") if module.startswith("torch.optim") else ""


def is_known(name: str, module: str) -> bool:
    return name in ELEMENTWISE and module.startswith("torch.optim")
