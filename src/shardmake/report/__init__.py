"""The report page and the model card of a run."""
