"""Convert a checkpoint for another strategy or number of ranks, with every weight and optimizer state unchanged."""
