"""The C allocator of this process: what it holds free, and how it gives memory back.

Two are known: tcmalloc, which `echelon run` preloads where a machine has it, and the C library's own (glibc). With any other
everything here does nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""mallopt's options: from where on the end of the heap is given back; from where on a block has a mapping of its own, which goes when
it is freed; how many such mappings there may be."""

SHORT = {MMAP_MAX: 1 << 20, MMAP_THRESHOLD: 1 << 20, TRIM_THRESHOLD: 1 << 20}
"""Where memory is short."""


KEPT_BESIDE = 20
"""tcmalloc keeps about one part in so many of what training has in use, beside it: measured, docs/memory.md."""


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _process() -> ctypes.CDLL:
    """All that this process has loaded, in the order in which names are looked up: a preloaded allocator comes first."""
    return ctypes.CDLL(None)


def is_tcmalloc() -> bool:
    """Is tcmalloc in use?"""
    return hasattr(_process(), "MallocExtension_ReleaseFreeMemory")


def free_bytes() -> int:
    """Bytes that the allocator holds in pages of this process and that nobody uses: the next tensors take them. 0 where it does not tell."""
    if is_tcmalloc():
        return _property("tcmalloc.pageheap_free_bytes")
    try:
        mallinfo = _process().mallinfo2
    except AttributeError:  # before glibc 2.33, or another C library
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)


def kept_beside(in_use: int) -> int:
    """Bytes that the allocator is expected to hold free beside so many bytes of tensors."""
    return in_use // KEPT_BESIDE if is_tcmalloc() else 0


def release() -> None:
    """Gives what is free back to the system, once. Takes some milliseconds a GiB."""
    if is_tcmalloc():
        _process().MallocExtension_ReleaseFreeMemory()
    elif hasattr(_process(), "malloc_trim"):
        _process().malloc_trim(0)


def give_back_at_once() -> bool:
    """From now on what is freed goes back to the system at once, where the allocator can do that.

    It is kept otherwise, and a worker that gathers and frees layers grows by half and more. The price is that every large block is
    handed out anew and zeroed: a step that does little but gather took twice the processor time."""
    release()
    if is_tcmalloc():
        return bool(
            _process().MallocExtension_SetNumericProperty(
                b"tcmalloc.aggressive_memory_decommit", ctypes.c_size_t(1)
            )
        )
    mallopt = getattr(_process(), "mallopt", None)
    return mallopt is not None and all(bool(mallopt(option, value)) for option, value in SHORT.items())


def _property(name: str) -> int:
    """One of tcmalloc's numbers."""
    value = ctypes.c_size_t(0)
    found = _process().MallocExtension_GetNumericProperty(name.encode(), ctypes.byref(value))
    return value.value if found else 0
