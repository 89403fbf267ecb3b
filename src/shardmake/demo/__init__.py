"""The demo's inputs, made on the spot: a chat data set, a tokenizer and a small model."""

from shardmake.demo.inputs import make_inputs as make_inputs
