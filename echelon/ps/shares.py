"""How much of the summing each host takes, so that every link carries the same bytes. Pure.

n workers and k ≤ n servers, each on a link of B bytes a second in both directions at once; M bytes are summed and
everybody gets the sum. Let each worker hold the fraction w of the elements and each server the fraction s: nw + ks = 1.

A worker sends its addends of everything it does not hold, (1 - w)M, and the sums of what it holds to n - 1 others,
(n - 1)wM: together (1 + (n - 2)w)M, and it receives as much. A server receives nsM and sends nsM.

For n ≥ 2 a worker's load grows with w while a server's falls, so the larger of the two is least where they are equal:
1 + (n - 2)w = ns. With nw + ks = 1:

    w = (n - k) / D,   s = 2(n - 1) / D,   D = n² + kn - 2k,   time = nsM / B = 2n(n - 1)M / (D B)

k = 0 gives w = 1/n and 2(n - 1)/n M/B, the ring's; k = n gives w = 0 and M/B, the classic server's. More servers than
workers do not help: a worker must send and receive M. One worker has nothing to sum and holds everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Shares:
    """Whole numbers in proportion to what each server and each worker holds."""

    server: int
    worker: int


def shares(num_workers: int, num_servers: int) -> Shares:
    """What each holds when workers take part in the summing. Servers on hosts of their own count; one that lies on a
    worker's host shares its link and is no further host: leave it out of `num_servers`."""
    n, k = num_workers, num_servers
    if n < 1 or k < 0:
        raise ValueError(f"{n} workers and {k} servers: there must be a worker, and servers are not negative")
    if n == 1:
        return Shares(server=0, worker=1)
    if k >= n:
        return Shares(server=1, worker=0)
    return Shares(server=2 * (n - 1), worker=n - k)


def link_bytes(num_workers: int, num_servers: int, total_bytes: int) -> Fraction:
    """What the busiest link carries in each direction when shares are exact: divided by B it is the time of the formula."""
    n, k = num_workers, min(num_servers, num_workers)
    if n == 1:
        return Fraction(0)
    return Fraction(2 * n * (n - 1) * total_bytes, n * n + k * n - 2 * k)
