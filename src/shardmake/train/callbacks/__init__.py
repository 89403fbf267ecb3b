"""The callbacks that watch a training, one per file; `shardmake.train.trainer` puts them in order."""
