"""The folder of a run: its paths, and every record that one process writes there and another reads."""
