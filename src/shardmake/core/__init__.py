"""What every other package builds on: errors, atomic files, processes, disk space, permissions."""
