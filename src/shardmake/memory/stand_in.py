"""A micro step of a model that cannot be traced, from the sizes of its weights.

Each layer has a norm and its matrices in the order of its weights, with an activation after each. A token visits some
of the experts. What is not a matrix, such as a convolution or a scan, is not there: the figures are rough, and
`shardmake.plan.verdict` keeps a margin of half of them.
"""

from shardmake.memory import size_tensors as ops
from shardmake.memory.decoder import DecoderStep, weights_of
from shardmake.memory.decoder_sizes import Decoder
from shardmake.memory.model import SCORE_HEAD, matrix_share
from shardmake.memory.scenario import Scenario
from shardmake.memory.size_tensors import SizeTensor, TensorEvent


def stand_in(scenario: Scenario) -> list[TensorEvent]:
    """Return the events of one forward and backward pass."""
    model = scenario.model
    layers, words = len(model.blocks), model.vocab_size
    shape = Decoder(h=model.hidden_size, f=0, a=1, k=1, d=1, layers=layers, v=words, all_levers=True)
    return _StandIn(scenario, shape).run()


class _StandIn(DecoderStep):
    def __init__(self, scenario: Scenario, shape: Decoder) -> None:
        weights = weights_of(scenario, range(shape.layers))
        names = {"embedding": "model.embed_tokens.weight", "linear": "lm_head.weight", "norm": "model.norm.weight"}
        for tensor in scenario.model.tensors:
            if tensor.block is None and tensor.kind in names and len(tensor.shape) == 2 - (tensor.kind == "norm"):
                weights.setdefault(names[tensor.kind], weights[tensor.name])
                if tensor.kind == "linear":  # the last one is the head, whatever its name
                    weights[f"{SCORE_HEAD}.weight"] = weights[tensor.name]
        super().__init__(scenario, shape, weights)

    def _layer(self, hidden: SizeTensor, index: int, stops_early: bool = False) -> SizeTensor:
        out = ops.scale(ops.cast(ops.activation(ops.cast(hidden, 4)), hidden.item))
        for tensor in self.scenario.model.tensors:
            if tensor.block == index and len(tensor.shape) > 1:
                visits = max(1, round(self.tokens * matrix_share(tensor, self.scenario.model)))
                entry = ops.resized(out, visits * tensor.shape[-1])
                made = ops.linear(entry, self.weights[tensor.name])
                out = ops.activation(made)
        return ops.add(hidden, ops.resized(out, self.tokens * self.shape.h))
