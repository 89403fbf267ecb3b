"""Convert examples into token sequences on disk: sources, chat template, loss mask, packing.

The ranks import `shardmake.data.dataset`, which needs torch. The stage imports torch only when it runs.
"""

from shardmake.data.amount import estimate_length as estimate_length
from shardmake.data.check import check_first_rows as check_first_rows
from shardmake.data.check import check_sources as check_sources
from shardmake.data.preview import preview as preview
from shardmake.data.raw import check_raw as check_raw
from shardmake.data.stage import prepare as prepare
