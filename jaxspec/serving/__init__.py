"""For serving stacks: prefill, insert, generate and free, with the state in the caller's hands."""

from jaxspec.serving.engine import Prefilled, ServingEngine, StepResult

__all__ = ["Prefilled", "ServingEngine", "StepResult"]
