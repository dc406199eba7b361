"""Whether all ranks watch the same: asked once, for collectives that do not fit end the process, or wait for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lightning_module_monitor.distributed.ranks import Ranks


def disagreement(wishes: Sequence[str], ranks: Ranks) -> str:
    """What ranks want differently, the same sentence on each; nothing if they all want the same.

    Args:
        wishes: What this rank wants, one by one and in the order that is to be the same everywhere.
        ranks: Asked once, and where they differ once more.
    """
    digest = hashlib.sha256("\n".join(wishes).encode()).digest()
    if len(set(ranks.gather(digest))) == 1:
        return ""
    first, *others = ranks.gather(list(wishes))
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    only = [(0, one) for one in first if one not in other] + [(rank, one) for one in other if one not in first]
    what = f"rank {only[0][0]} alone has {only[0][1]!r}" if only else "they are in another order"
    return f"ranks 0 and {rank} do not watch the same: {what}; expected the same rules, steps and modules on every rank."
