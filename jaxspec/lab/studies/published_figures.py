"""Figures published with EQSPEC and EXSPEC, to be drawn next to our own; none of them is ours.

Source: "Batch Speculative Decoding Done Right", arXiv 2510.22876, version 3 (15 Feb 2026), and the
log that its code prints in a comment of `c_overhead_b.py` (github.com/eBay/spec_dec at 96e1d12).
They were measured on other hardware, with other models and other code, so no axis should mix theirs
and ours without saying so.
"""

from __future__ import annotations

SOURCE = "Batch Speculative Decoding Done Right, arXiv 2510.22876v3"
HARDWARE = (
    "NVIDIA A100 80 GB, PyTorch 2.7, transformers 4.51.3, fp16, greedy, draft length 5; raw first "
    "turns of Spec-Bench"
)
MODELS = {
    "Vicuna": "vicuna-7b-v1.3 / vicuna-68m",
    "Qwen3": "Qwen3-8B / 0.6B",
    "GLM4": "GLM-4-9B-0414 / GLM-4.5-DRAFT-0.6B",
}

# Table 1: exact and partial match with batch-1 plain decoding, per cent, by model and batch size.
# They compare decoded text, so text after an EOS token counts as a difference.
_TABLE_1 = """\
non-speculative batch (HF)  -          53.8/98.2  -          92.9/96.5  -          93.3/97.2
speculative, batch 1 (HF)   97.1/98.4  -          94.6/97.2  -          96.0/98.0  -
EQSPEC                      97.3/98.6  92.1/98.6  94.6/96.9  92.3/95.7  96.7/98.1  96.5/98.3
EXSPEC                      97.3/98.6  90.8/97.6  94.6/96.9  95.0/97.1  96.7/98.1  95.2/97.7
DSD                         0.0/8.1    0.0/2.2    0.2/2.2    0.0/0.6    0.0/1.0    0.0/0.8
BSP                         1.9/39.7   0.2/31.3   3.5/19.9   2.1/12.6   1.0/15.3   0.6/8.1
"""
_CASES = [(model, batch) for model in MODELS for batch in (1, 4)]  # the columns
EQUIVALENCE = {
    line[:28].strip(): {
        case: tuple(map(float, cell.split("/")))
        for case, cell in zip(_CASES, line[28:].split(), strict=True)
        if cell != "-"
    }
    for line in _TABLE_1.splitlines()
}

# Table 2: Vicuna, batch 4, 100 prompts of at most 128 new tokens. Shares in per cent.
TIME_BREAKDOWN: dict[str, dict[str, float]] = {
    "EQSPEC": {
        "tokens_per_s": 95.6,
        "calls": 1469,
        "verify_ms": 24.9,
        "verify": 44.9,
        "draft": 27.4,
        "overhead": 27.7,
        "acceptance": 0.228,
    },
    "EXSPEC": {
        "tokens_per_s": 156.4,
        "calls": 952,
        "verify_ms": 29.1,
        "verify": 55.9,
        "draft": 29.5,
        "overhead": 14.6,
        "acceptance": 0.229,
    },
}

# Table 4: simulated serving of shuffled multi-turn Spec-Bench; tokens/s and request latency in s.
SERVING: dict[str, dict[int, dict[str, float]]] = {
    "EQSPEC": {
        1: {"tokens_per_s": 15.20, "p50": 6.70, "p90": 12.96, "p99": 16.53},
        2: {"tokens_per_s": 26.70, "p50": 7.96, "p90": 14.78, "p99": 19.06},
        4: {"tokens_per_s": 46.11, "p50": 9.46, "p90": 16.23, "p99": 19.13},
        8: {"tokens_per_s": 76.03, "p50": 11.26, "p90": 19.23, "p99": 22.50},
    },
    "EXSPEC": {
        1: {"tokens_per_s": 15.78, "p50": 6.08, "p90": 8.32, "p99": 9.42},
        2: {"tokens_per_s": 30.54, "p50": 9.75, "p90": 114.89, "p99": 134.03},
        4: {"tokens_per_s": 52.44, "p50": 8.01, "p90": 53.21, "p99": 70.35},
        8: {"tokens_per_s": 77.54, "p50": 9.16, "p90": 19.13, "p99": 33.93},
    },
}

# Figure 5c: same-length calls of all calls, per cent, Multi30k, window 50. The text names only
# 23.6 at batch 2; that the others belong to batches 2, 4, ... in this order is our reading.
GROUPING: dict[str, dict[int, float]] = {
    "equal lengths": {2: 95.9, 4: 89.3, 8: 84.1, 16: 70.7, 32: 44.2},
    "random lengths": {2: 23.6, 4: 17.5, 8: 4.8, 16: 1.3, 32: 0.0},
}
