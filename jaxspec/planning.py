"""Plans of the settings that fit a budget of memory at the least cost in speed."""

from jaxspec.lab.plan.plan import MemoryPlan
from jaxspec.lab.plan.planner import plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
