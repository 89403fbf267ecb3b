"""From examples to token sequences on disk: sources, chat template and loss mask, packing.

The ranks import `shardmake.data.dataset`, which needs torch; the stage does not until it runs.
"""

from shardmake.data.stage import check_sources as check_sources
from shardmake.data.stage import prepare as prepare
