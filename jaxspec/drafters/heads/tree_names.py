"""Trees of heads by name, as `--drafter KIND[TREE]:NAME` has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeAlias

from jaxspec.drafters.growth import Tree
from jaxspec.drafters.heads.medusa_choices import medusa_tree
from jaxspec.drafters.trees import BeamTree, BudgetTree
from jaxspec.errors import SettingError

# Of the number of heads, since a budget is spent on as many levels as there are.
MakeTree: TypeAlias = Callable[[int], Tree | Literal["chain"] | None]

_BUDGET = re.compile(r"(?:budget:)?(\d{1,9})", re.ASCII)
_BEAM = re.compile(r"(\d{1,9})x(\d{1,9}):(\d{1,9})", re.ASCII)
_FORMS = "chain, NODES, WIDTHxDEPTH:NODES, or one of Medusa's trees such as mc_sim_7b_63"


def parse_tree(text: str) -> MakeTree:
    """What makes the tree that a text names for a number of heads.

    Args:
      text: `chain`; `NODES` or `budget:NODES`, Clover's tree of so many nodes; `WIDTHxDEPTH:NODES`,
        a beam search's best nodes; or the name of a tree of the Medusa release.

    Raises:
      SettingError: it names none, or one whose numbers are out of range.
    """
    if text == "chain":
        return lambda num_heads: "chain"
    if match := _BUDGET.fullmatch(text):
        nodes = int(match[1])
        BudgetTree(nodes=nodes, depth=1)  # raises now
        return lambda num_heads: BudgetTree(nodes=nodes, depth=min(num_heads, nodes))
    if (beam := parse_beam(text)) is not None:
        return lambda num_heads: beam
    if not re.fullmatch(r"[a-z]\w*", text, re.ASCII):
        raise SettingError(f"The tree {text!r} was given; write {_FORMS}.")
    static = medusa_tree(text)
    return lambda num_heads: static


def parse_beam(text: str) -> BeamTree | None:
    """The beam tree `WIDTHxDEPTH:NODES` that a text names, or None if it has another form.

    Raises:
      SettingError: its numbers are out of range.
    """
    match = _BEAM.fullmatch(text)
    return None if match is None else BeamTree(*map(int, match.groups()))
