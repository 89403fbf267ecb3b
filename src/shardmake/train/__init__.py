"""The program of the ranks: Trainer or a user's script, with heartbeats and committed checkpoints."""
