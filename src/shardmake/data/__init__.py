"""Convert examples into token sequences on disk: read, standardize, encode, fit, mix, pack and write.

The ranks import `shardmake.data.dataset`, which needs torch. The stage imports torch only when it runs.
"""
