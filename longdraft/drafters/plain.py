"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from longdraft.core import Context
from longdraft.model.routine import atomic
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, root_only


class PlainDrafter:
    def begin(self, context: Context, verified: Verified | None) -> None:
        pass

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        return root_only(context.last)

    def observe(self, context: Context, accepted: Accepted) -> None:
        pass
