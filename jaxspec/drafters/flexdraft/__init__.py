"""FlexDraft: the last layers of the target draft a whole block (arXiv 2605.20022)."""
