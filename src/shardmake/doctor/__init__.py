"""`shardmake doctor`: check a login node and compute nodes before the first run, and write a cluster file."""
