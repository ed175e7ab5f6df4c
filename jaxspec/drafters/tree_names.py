"""Trees by name: `8`, `4x4:12`, `mc_sim_7b_63`."""

from __future__ import annotations

import re

from jaxspec.drafters.medusa_choices import medusa_tree
from jaxspec.drafters.trees import BeamTree, BudgetTree, Tree
from jaxspec.errors import SettingError

# A number of more than nine digits is a mistake, and would be slow to parse.
_BUDGET = re.compile(r"(?:budget:)?(\d{1,9})", re.ASCII)
_BEAM = re.compile(r"(\d{1,9})x(\d{1,9}):(\d{1,9})", re.ASCII)


def named_tree(name: str | int, *, most_levels: int | None = None) -> Tree:
    """The tree of a name.

    Args:
      name: `WIDTHxDEPTH:NODES`, a beam search's best nodes; the name of a tree of the Medusa
        release; or `NODES`, a `BudgetTree` of so many nodes.
      most_levels: levels that a `BudgetTree` may have; None where its nodes cannot be spread over
        levels, as with a draft model.

    Raises:
      SettingError: there is no such tree, or its numbers are out of range.
    """
    name = str(name)
    if match := _BEAM.fullmatch(name):
        width, depth, nodes = map(int, match.groups())
        return BeamTree(width, depth, nodes)
    match = _BUDGET.fullmatch(name)
    if match and most_levels is not None:
        nodes = int(match[1])
        return BudgetTree(nodes=nodes, depth=min(most_levels, max(nodes, 1)))
    if not re.fullmatch(r"[a-z]\w*", name, re.ASCII):
        forms = "" if most_levels is None else "chain, NODES, "
        raise SettingError(
            f"The tree {name!r} was given; write {forms}WIDTHxDEPTH:NODES as in 4x4:12, or one of "
            "Medusa's trees such as mc_sim_7b_63."
        )
    return medusa_tree(name)
