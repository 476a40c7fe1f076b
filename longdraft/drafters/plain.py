"""Plain decoding: the drafter that drafts nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from longdraft.drafters.options import DrafterOptions
from longdraft.request.context import Context
from longdraft.request.tree import Tree, root_only
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import atomic


@dataclass(frozen=True)
class PlainOptions(DrafterOptions):
    """`plain` has no options."""


class PlainDrafter:
    plain_steps = sys.maxsize  # all

    def begin(self, context: Context, verified: Verified | None) -> None:
        pass

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        return root_only(context.last)

    def observe(self, context: Context, accepted: Accepted) -> None:
        pass
