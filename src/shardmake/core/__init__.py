"""The base of all other packages: errors, logging, atomic files, processes, disk space, permissions."""
