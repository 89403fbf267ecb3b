"""A micro step of a model that cannot be traced, from the sizes of its weights.

Each layer has a norm and its matrices in the order of its weights, with an activation after each. A token visits some
of the experts. What is not a matrix, such as a convolution or a scan, is not there: the figures are rough, and
`shardmake.plan.verdict` keeps a margin of half of them.
"""

from shardmake.memory import size_tensors
from shardmake.memory.decoder import DecoderStep
from shardmake.memory.model import Decoder, matrix_share
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
        super().__init__(scenario, shape)
        self.matrices: dict[int, list[tuple[str, int, int, float]]] = {}
        names = {"embedding": "model.embed_tokens.weight", "linear": "lm_head.weight"}
        for tensor in scenario.model.tensors:
            if tensor.block is None and len(tensor.shape) == 2 and tensor.kind in names:
                self._name(tensor.name, names[tensor.kind])
            elif tensor.block is None and tensor.kind == "norm":
                self._name(tensor.name, "model.norm.weight")
            elif tensor.block is not None and len(tensor.shape) > 1 and tensor.name in self.weights.items:
                share = matrix_share(tensor, scenario.model)
                rows, columns = tensor.shape[-2:]
                self.matrices.setdefault(tensor.block, []).append((tensor.name, rows, columns, share))

    def _name(self, name: str, common: str) -> None:
        """Let the weight ``name`` also be known under the ``common`` name."""
        self.weights.items.setdefault(common, self.weights.items[name])
        self.weights.shapes.setdefault(common, self.weights.shapes[name])

    def _layer(self, hidden: SizeTensor, index: int, stops_early: bool = False) -> SizeTensor:
        out = size_tensors.scale(size_tensors.cast(size_tensors.activation(size_tensors.cast(hidden, 4)), hidden.item))
        for name, rows, columns, share in self.matrices.get(index, []):
            visits = max(1, round(self.tokens * share))
            entry = size_tensors.resized(out, visits * columns)
            made = size_tensors.linear(
                entry, self.weights.items[name], rows, columns, expanded=name in self.weights.quantized
            )
            out = size_tensors.activation(made)
        return size_tensors.add(hidden, size_tensors.resized(out, self.tokens * self.shape.h))
