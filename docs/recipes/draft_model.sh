#!/bin/sh
# A draft model for SmolLM2-135M-Instruct: sh docs/recipes/draft_model.sh MODEL texts.jsonl RUN
#
# Two layers of 256 channels, rows for the 8,192 most frequent tokens; distilled from the model's
# 32 likeliest tokens after each token of the texts, in four passes. The texts are those of clover.py.
# An interrupted run is continued by the line that it prints.
set -e
jaxspec train lm --teacher "$1" --corpora "$2" --out "$3" \
  --width 256 --feed-forward-width 768 --num-layers 2 --draft-vocab-size 8192 \
  --tokens 9000000 --checkpoint-every 500
