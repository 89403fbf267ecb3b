"""The end of a run: evaluation, model card, push, report."""
