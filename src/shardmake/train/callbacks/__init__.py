"""The callbacks that watch a training, one per file; `shardmake.train.training_callbacks` puts them in order."""
