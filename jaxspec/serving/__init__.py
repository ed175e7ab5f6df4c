"""For serving stacks: prefill, insert, generate and free, with a state that the caller holds."""

from jaxspec.serving.engine import Prefilled, ServingEngine, StepResult

__all__ = ["Prefilled", "ServingEngine", "StepResult"]
