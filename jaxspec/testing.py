"""The conformance battery: checks that your own model or drafter keeps the contracts of decoding.

    from jaxspec.testing import check_drafter, check_model

    check_model(my_model).assert_ok()
    check_drafter(my_drafter, my_model).assert_ok()

A check has passed, has FAILED, is untested (it applies, but nothing happened that could have broken
it, for example because a drafter drafted nothing), or does not apply. Each names the clause that it
tests:

    C1  a row stands at an offset of its own, one integer is the truth about its length, and what
        lies beyond it in the cache is garbage
    C2  shapes are static: one program each, whatever the values
    C4  exactness: E1 a drafted token is scored as plain decoding scores it, bit for bit; E2 a
        request is alone; E3 sampled tokens too; E4 other programs agree within rounding
    C5  a draft is a tree of one shape
    C6  pure functions of the parameters that they are given

Both batteries run on the object as it is, through the production loop where it matters, with a
small batch and a small cache. Comparisons up to rounding are strictest with weights in fp32.
Bitwise comparisons are made within one compiled program.

`MODEL_CHECKS` and `DRAFTER_CHECKS` are the tables of checks. A new check is a function in
`jaxspec.conformance.model` or `.drafter` with the decorator `@enters(table, clause, statement)`.
"""

from jaxspec.conformance.drafter import DRAFTER_CHECKS, battery_prompts, check_drafter
from jaxspec.conformance.model import MODEL_CHECKS, check_model
from jaxspec.conformance.report import Check, Clause, ConformanceReport, Outcome

__all__ = [
    "DRAFTER_CHECKS",
    "MODEL_CHECKS",
    "Check",
    "Clause",
    "ConformanceReport",
    "Outcome",
    "battery_prompts",
    "check_drafter",
    "check_model",
]
