"""``python -m shardmake.cli``."""

from shardmake.cli import main

main()
