"""The driver that owns a training job, the worker on each node, and everything between them."""
