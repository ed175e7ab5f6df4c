"""What XLA made of an engine's round."""

import math
import re


def compiled(engine):
    """Its rounds of the widest verify length."""
    return engine.executor.lower_run().compile()


def whole_cache_moves(text, sizes):
    """Instructions of an HLO text that copy, convert or re-lay an array as large as a cache."""
    moves = re.findall(r"= (?:f32|bf16|u16)\[([\d,]+)\]\S* (copy|convert|transpose|gather)\(", text)
    return [
        (shape, kind) for shape, kind in moves if math.prod(map(int, shape.split(","))) in sizes
    ]
