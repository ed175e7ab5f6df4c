"""Training of small language models and drafts on CPU or accelerator."""
