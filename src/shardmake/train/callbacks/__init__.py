"""The callbacks that watch a training, one per file; `shardmake.train.training_setup` puts them in order."""
