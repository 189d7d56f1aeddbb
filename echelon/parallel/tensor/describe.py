"""A model as the plan sees it: its modules with their kinds and sizes."""

from __future__ import annotations

from torch import nn

from echelon.parallel.tensor.words import Node

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU,
    nn.Softplus, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.Dropout, nn.Softsign, nn.LogSigmoid, nn.Hardsigmoid,
)  # fmt: skip
CHANNELWISE = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Upsample,
)  # fmt: skip
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def nodes(model: nn.Module) -> list[Node]:
    """In the order of the model's modules."""
    weights: dict[int, int] = {}
    found = [_node(path, module, weights) for path, module in model.named_modules()]
    inside = {
        f"{n.path}.out_proj" for n in found if n.kind == "attention"
    }  # its weight is taken, it is never called
    return [n for n in found if n.path not in inside]


def _node(path: str, module: nn.Module, weights: dict[int, int]) -> Node:
    kind = type(module)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        weight = module.weight
        number = weights.setdefault(id(weight), len(weights) + 1)
        rows, columns = (int(n) for n in weight.shape) if weight.dim() == 2 else (0, 0)
        name = "linear" if isinstance(module, nn.Linear) else "embedding"
        return Node(path, name, kind.__name__, rows, columns, (), number, _refused(module))
    if transposed(module):
        columns, rows = (int(n) for n in module._parameters["weight"].shape)  # type: ignore[union-attr]
        number = weights.setdefault(id(module._parameters["weight"]), len(weights) + 1)
        return Node(path, "linear", kind.__name__, rows, columns, (), number, _hooked(module))
    if isinstance(module, nn.MultiheadAttention):
        numbers = (("num_heads", module.num_heads),)
        return Node(path, "attention", kind.__name__, numbers=numbers, refused=_no_heads(module))
    if kind in CONVOLUTIONS:
        assert isinstance(module, CONVOLUTIONS)
        number = weights.setdefault(id(module.weight), len(weights) + 1)
        rows, columns = module.out_channels, module.in_channels
        return Node(path, "convolution", kind.__name__, rows, columns, (), number, _refused(module))
    if kind in NORMS:
        assert isinstance(module, NORMS)
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        return Node(
            path, "norm", kind.__name__, module.num_features, refused="it has hooks" if hooked else ""
        )
    if kind in LAYERS:
        return Node(path, "layer", kind.__name__)
    if kind is nn.Sequential:
        return Node(path, "sequential", kind.__name__)
    if isinstance(module, CHANNELWISE):
        return Node(path, "channelwise", kind.__name__)
    if isinstance(module, ELEMENTWISE):
        return Node(path, "elementwise", kind.__name__)
    plain = tuple((k, v) for k, v in vars(module).items() if type(v) is int)
    return Node(path, "other", kind.__name__, numbers=plain)


def transposed(module: nn.Module) -> bool:
    """A linear layer as GPT-2's code has it (`Conv1D`): its weight is (input features, output features)."""
    weight = module._parameters.get("weight")
    return (
        type(module).__name__ == "Conv1D"
        and weight is not None
        and weight.shape[1:] == (getattr(module, "nf", -1),)
    )


def _hooked(module: nn.Module) -> str:
    if "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    return (
        "it has hooks that see its input or output"
        if module._forward_hooks or module._forward_pre_hooks
        else ""
    )


def _refused(module: nn.Module) -> str:
    """Code of its own may do anything with its weight; so may a parametrization or a hook."""
    own = type(module).forward not in (
        nn.Linear.forward,
        nn.Embedding.forward,
        *(c.forward for c in CONVOLUTIONS),
    )
    if own:
        return f"{type(module).__name__} has a forward of its own"
    if "weight" not in module._parameters or hasattr(module, "parametrizations"):
        return "its weight is computed from other parameters"
    if hooked := _hooked(module):
        return hooked
    if isinstance(module, CONVOLUTIONS) and (module.groups > 1 or module.transposed):
        return "its channels are in groups"
    if isinstance(module, nn.Embedding):
        if module.sparse:
            return "its gradients are sparse"
        if module.max_norm is not None or module.scale_grad_by_freq:
            return "max_norm and scale_grad_by_freq need the whole table"
    return ""


def _no_heads(module: nn.MultiheadAttention) -> str:
    if type(module).forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "bias_k, bias_v and add_zero_attn are not split"
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        return "it has hooks or parametrizations"
    return ""
