"""Trees that draft models and heads draft, and the best one for measured acceptance."""

from jaxspec.drafters.trees import BeamTree, BudgetTree, StaticTree, best_static_tree

__all__ = ["BeamTree", "BudgetTree", "StaticTree", "best_static_tree"]
