"""Generate the demo's inputs: a chat data set, a tokenizer and a small model."""

from shardmake.demo.inputs import make_inputs as make_inputs
from shardmake.demo.preferences import make_preferences as make_preferences
