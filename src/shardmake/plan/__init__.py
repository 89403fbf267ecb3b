"""From a model, data shape and cluster to a plan that fits, and the files that run it."""
