"""The program of the ranks: Trainer, the plain loop or a user's script, with heartbeats and committed checkpoints."""
