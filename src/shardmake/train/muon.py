"""Muon for the matrices of the layers and AdamW for all other weights, as one optimizer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from shardmake.core.private_names import private, private_module

_TORCH: Final = private(private_module("muon"))
_MOMENTUM: Final = 0.95
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_STEPS: Final = 5
_EPSILON: Final = 1e-7


@dataclass(frozen=True)
class Piece:
    """The part of a matrix that a rank's flat vector holds under ZeRO."""

    shape: torch.Size
    start: int
    """First element in the matrix."""
    place: int
    """First element in the vector."""
    count: int
    """Elements; 0 if other ranks hold them all."""
    group: dist.ProcessGroup | None
    """The ranks that exchange the pieces; None if this one holds the matrix."""

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [count], a view of its ``vector``."""
        return vector.narrow(0, self.place, self.count)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the matrix of which each rank of the group has a ``part`` [count]."""
        if self.group is None:
            return part.view(self.shape)
        matrix = part.new_zeros(self.shape)
        self.part(matrix).copy_(part)
        dist.all_reduce(matrix, group=self.group)  # exact, because one rank has an element and the others have zero
        return matrix

    def part(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [count] of a ``matrix``."""
        return matrix.reshape(-1).narrow(0, self.start, self.count)


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW whose groups with ``orthogonal: True`` take the update of `torch.optim.Muon`, with its defaults.

    ``match_rms_adamw`` gives a matrix an update of the size of AdamW's, so that one learning rate serves both.
    """

    pieces: Mapping[torch.Tensor, list[Piece]] = MappingProxyType({})
    """Under ZeRO, the matrices in each flat vector, in the same order on all ranks."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.defaults["orthogonal"] = False
        for group in self.param_groups:
            group.setdefault("orthogonal", False)
        private(self).step_supports_amp_scaling = False  # a scaler would leave inf in gradients to the fused kernel

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights; ``closure`` is AdamW's."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            for weight in group["params"] if group["orthogonal"] else ():
                if weight.grad is not None:
                    self._update(weight, weight.grad, group["lr"], group["weight_decay"])
        return loss

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, rate: float, decay: float) -> None:
        """Update a matrix [rows, columns], or this rank's pieces of matrices in a vector of ZeRO, in place."""
        state = self.state[weight]
        if not state:  # AdamW does not load a state without a step
            state.update(step=torch.zeros(()), momentum_buffer=torch.zeros_like(gradient))
        state["step"] += 1
        momentum = state["momentum_buffer"]
        if weight not in self.pieces:
            _update_matrix(weight, gradient, momentum, rate, decay)
        for piece in self.pieces.get(weight, ()):
            _update_matrix(piece.of(weight), piece.of(gradient), piece.of(momentum), rate, decay, piece)


def _update_matrix(
    weight: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, rate: float, decay: float,
    piece: Piece | None = None,
) -> None:  # fmt: skip
    """Update a matrix, or a ``piece`` of one, in place; ranks that share one compute its whole update."""
    momentum.lerp_(gradient, 1 - _MOMENTUM)
    update = gradient.lerp(momentum, _MOMENTUM).bfloat16()
    if isinstance(update, DTensor):
        update = update.full_tensor()
    elif piece:
        update = piece.whole(update)
        if not piece.count:
            return
    shape = update.shape
    update = _TORCH.zeropower_via_newtonschulz(update, _COEFFICIENTS, _STEPS, _EPSILON)
    if isinstance(weight, DTensor):
        update = distribute_tensor(update, weight.device_mesh, weight.placements, src_data_rank=None)
    elif piece:
        update = piece.part(update)
    weight.mul_(1 - rate * decay)
    weight.add_(update, alpha=-_TORCH.adjust_lr(rate, "match_rms_adamw", shape))


def find_pieces(engine: Any) -> None:
    """Set the optimizer's pieces if DeepSpeed's ``engine`` trains with Muon; other models stay as they are."""
    zero: Any = getattr(engine, "optimizer", None)
    if isinstance(inner := getattr(zero, "optimizer", None), MuonWithAdamW):
        is_third = engine.zero_optimization_stage() == 3
        vectors = zero.fp32_partitioned_groups_flat if is_third else zero.single_partition_of_fp32_groups
        find = _equal_pieces if is_third else _cut_pieces
        inner.pieces = {vector: [*find(zero, number)] for number, vector in enumerate(vectors)}


def _cut_pieces(zero: Any, number: int) -> Iterator[Piece]:
    """Yield those in vector ``number`` of ZeRO-1 or ZeRO-2: the ranks' vectors follow each other and cut matrices."""
    group, size = zero.real_dp_process_group[number], int(zero.partition_size[number])
    rank = dist.get_rank(group)
    starts, places = zero.grad_start_offset[number][rank], zero.grad_partition_insertion_offset[number][rank]
    for parameter in zero.round_robin_bit16_groups[number]:
        key = zero.get_param_id(parameter)
        start, place = starts.get(key, 0), places.get(key, 0)
        count = min(parameter.numel() - start, size - place) if key in starts else 0
        is_shared = len(zero.param_to_partition_ids[number][key]) > 1
        if count or is_shared:
            yield Piece(parameter.shape, start, place, count, group if is_shared else None)


def _equal_pieces(zero: Any, number: int) -> Iterator[Piece]:
    """Yield those in vector ``number`` of ZeRO-3: equal parts of matrices, the last one shorter or empty."""
    place = 0
    for parameter in zero.fp16_groups[number]:
        group, held = parameter.ds_process_group, parameter.partition_numel()
        start = min(dist.get_rank(group) * held, parameter.ds_numel)
        yield Piece(parameter.ds_shape, start, place, min(held, parameter.ds_numel - start), group)
        place += held
