"""The batch's shared groups as a forest, and the one level of it that kernels without a cascade read together.

Leaves how groups come to be nested to `batch_builder`, and cascades to `cascade`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.batch import SharedGroup
from shared.nesting import antichain


def parents(group_rows: Sequence[NDArray[np.int32]]) -> list[int]:
    """Of each group the one around it, or -1; the outer come before the inner."""
    innermost: dict[int, int] = {}
    found: list[int] = []
    for group, rows in enumerate(group_rows):
        members = rows.tolist()
        found.append(innermost.get(members[0], -1))
        innermost.update(dict.fromkeys(members, group))
    return found


def one_level(groups: Sequence[SharedGroup]) -> list[SharedGroup]:
    """Of nested groups those that save most, such that each row is in one at most."""
    if len(groups) < 2:
        return list(groups)
    around = parents([group.rows.numpy() for group in groups])
    saved = [(len(group.rows) - 1) * group.num_pages for group in groups]
    return [groups[chosen] for chosen in antichain(around, saved)]
