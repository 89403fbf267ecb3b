"""Convert examples into token sequences on disk: sources, chat template, loss mask, packing.

The ranks import `shardmake.data.dataset`, which needs torch. The stage imports torch only when it runs.
"""

from shardmake.data.check import check_first_rows as check_first_rows
from shardmake.data.check import check_sources as check_sources
from shardmake.data.check import estimate_length as estimate_length
from shardmake.data.sources import check_raw as check_raw
from shardmake.data.stage import prepare as prepare
from shardmake.data.stage import preview as preview
