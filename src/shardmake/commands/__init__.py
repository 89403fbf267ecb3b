"""Commands that are not stages of the workflow."""
