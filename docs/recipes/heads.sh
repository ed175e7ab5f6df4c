#!/bin/sh
# Heads of a kind for SmolLM2-135M-Instruct, as their paper has them, to compare kinds:
#   sh docs/recipes/heads.sh KIND MODEL texts.jsonl held-out.jsonl RUN
#
# The texts are those of clover.py; held-out.jsonl answers the last prompts of prompts.jsonl:
#   tail -n 900 prompts.jsonl > last.jsonl
#   jaxspec train texts --target MODEL --prompts last.jsonl --chat --split held-out --out held-out.jsonl
# TOKENS is the number of training tokens, 2,048,000 unless it is given.
# All kinds read the same hidden states, which are kept in RUN's parent directory.
set -e
jaxspec train heads --kind "$1" --target "$2" --texts "$3" --held-out "$4" --out "$5" \
  --target-states "$(dirname "$5")/states" --num-heads 4 --draft-vocab-size 8192 \
  --tokens "${TOKENS:-2048000}" --batch-tokens 2048 --learning-rate 1.5e-3
