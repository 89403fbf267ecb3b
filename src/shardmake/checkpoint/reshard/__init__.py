"""Resume under another strategy or on another number of ranks, with every weight and optimizer state as it was."""
