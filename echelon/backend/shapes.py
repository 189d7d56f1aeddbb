"""Do the tensors of a call of torch.distributed fit together? Pure; what does not is refused before anything begins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from echelon.errors import UsageError


class RefusedError(UsageError, ValueError, RuntimeError):
    """A call that cannot mean anything, as whoever calls torch.distributed may expect to catch it."""


def alike(size: int, verb: str, many: Sequence[Tensor], one: Tensor) -> None:
    """Is there one tensor a rank, each like the single one?"""
    wrong = [tuple(x.shape) for x in many if x.shape != one.shape or x.dtype != one.dtype]
    if len(many) != size or wrong:
        raise RefusedError(
            f"{verb}: {len(many)} tensors for {size} ranks, of which {wrong} are unlike the single {tuple(one.shape)} {one.dtype}",
            remedy=f"Give {size} tensors of one shape and type.",
        )


def rows(size: int, verb: str, many: Tensor, one: Tensor) -> None:
    """Has `many` room for as many of `one` as there are ranks?"""
    if many.numel() != one.numel() * size or many.dtype != one.dtype:
        raise RefusedError(
            f"{verb}: {tuple(many.shape)} {many.dtype} is not {size} times {tuple(one.shape)} {one.dtype}"
        )


def splits(size: int, x: Tensor, given: Sequence[int]) -> list[int]:
    """Splits of the first dim (none: equal ones) as counts of elements, one a rank."""
    num_rows = x.shape[0] if x.dim() else 1
    if not given:
        if num_rows % size:
            raise RefusedError(
                f"all_to_all_single: {num_rows} rows cannot be dealt evenly to {size} ranks",
                remedy="Give the split sizes of input and output.",
            )
        given = [num_rows // size] * size
    if sum(given) != num_rows or len(given) != size:
        raise RefusedError(
            f"all_to_all_single: splits {list(given)} do not cut {num_rows} rows for {size} ranks"
        )
    row = x.numel() // num_rows if num_rows else 0
    return [n * row for n in given]
