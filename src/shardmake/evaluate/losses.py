"""Losses of a causal language model at the positions with labels, without the logits of a whole pass at once.

Logits need far more memory than hidden states: 2 bytes x vocabulary a token, and 4 more in fp32. The decoder therefore
runs over the whole pass, and the head only over the positions with labels, a part at a time. The head is the rest of
the model's own forward pass, with the decoder replaced by what it has computed, so that softcaps and scales apply.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.utils import ModelOutput

from shardmake.core.private_names import private
from shardmake.data.dataset import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
_LOGITS = 2**27  # at once; with their fp32 copy and the softmax about 1.3 GiB
_TOLERANCE = 0.02  # of the largest logit; bf16 rounds a product of other sizes differently by up to 0.004
Inputs = Mapping[str, torch.Tensor]


class TokenScores(NamedTuple):
    """Losses (1-D, fp32), and if each token is the most likely one (1-D, bool)."""

    losses: torch.Tensor
    likeliest: torch.Tensor


class LossPerToken:
    """Loss at each position of a batch; it checks first if the network's head can be applied apart from its decoder.

    Ranks that gather weights from each other must create it together and call it equally often.
    """

    def __init__(self, network: "PreTrainedModel", ids: torch.Tensor) -> None:
        """Check the head on the tokens ``ids`` (1-D)."""
        self.network = network
        self.part = max(1, _LOGITS // network.config.get_text_config().vocab_size)
        self.in_parts = self._can_split({"input_ids": ids[None, :16].to(network.device)})
        if not self.in_parts:
            logger.warning(
                f"{type(network).__name__}: the head cannot be applied in parts. The logits of a pass are computed at "
                "once, which takes more memory."
            )

    def __call__(self, inputs: Inputs, labels: torch.Tensor) -> TokenScores:
        """Return the scores of the labels after the first one that are not ignored, in their order.

        Each position of ``inputs`` predicts the label after it. All tensors are ``[sequences, tokens]``.
        """
        wanted = (labels[:, 1:] != IGNORED).to(self.network.device)
        targets = labels[:, 1:].to(self.network.device)[wanted]
        if not self.in_parts:
            logits = self.network(**inputs, use_cache=False).logits[:, :-1]
            return _token_scores(logits[wanted.to(logits.device)], targets)
        decoder, output = _run_decoder(self.network, inputs)
        hidden = output.last_hidden_state[:, :-1]
        hidden = hidden[wanted.to(hidden.device)]
        with _head_alone(self.network, decoder, type(output)) as head:
            pairs = zip(hidden.split(self.part), targets.split(self.part), strict=True)
            parts = [_token_scores(head(states), labels) for states, labels in pairs]
        return TokenScores(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _can_split(self, inputs: Inputs) -> bool:
        """Return if decoder and head apart give the logits of the whole network."""
        if "logits_to_keep" not in inspect.signature(type(self.network).forward).parameters:
            return False
        whole = self.network(**inputs, use_cache=False).logits[0]
        try:
            decoder, output = _run_decoder(self.network, inputs)
            with _head_alone(self.network, decoder, type(output)) as head:
                apart = head(output.last_hidden_state[0]).to(whole.device)
        except Exception as error:  # code of a model that is built in another way may fail with anything
            logger.warning(f"{type(self.network).__name__}: {type(error).__name__}: {error}")
            return False
        return bool((apart - whole).abs().max() <= _TOLERANCE * whole.abs().max())


def _token_scores(logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    targets = targets.to(logits.device)
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return TokenScores(losses, logits.argmax(-1) == targets)


def _run_decoder(network: "PreTrainedModel", inputs: Inputs) -> tuple[torch.nn.Module, Any]:
    """Run ``network`` with the head on one position; return its decoder and what the decoder returned."""
    outputs: dict[torch.nn.Module, Any] = {}

    def keep(module: torch.nn.Module, _: Any, output: Any) -> None:
        outputs[module] = output

    parts = [network.base_model, network.get_decoder()]  # OPT calls the inner one itself
    hooks = [part.register_forward_hook(keep) for part in parts if part is not network]
    try:
        network(**inputs, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return next(((part, outputs[part]) for part in parts if part in outputs), (network, None))


@contextmanager
def _head_alone(network: "PreTrainedModel", decoder: torch.nn.Module, output: type[ModelOutput]) -> Iterator[Any]:
    """Yield a function from hidden states ``[positions, hidden]`` to logits: what follows ``decoder``."""
    path, _, name = next(path for path, part in network.named_modules() if part is decoder).rpartition(".")
    owner, computed = network.get_submodule(path), torch.nn.Module()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        computed.forward = lambda *_, **__: output(last_hidden_state=hidden[None])
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return type(network).forward(network, input_ids=ids, use_cache=False).logits[0]

    setattr(owner, name, computed)
    try:
        with _gathered(network):
            yield head
    finally:
        setattr(owner, name, decoder)


@contextmanager
def _gathered(network: "PreTrainedModel") -> Iterator[None]:
    """Hold the parameters of ``network`` (without its decoder) complete if ZeRO-3 has partitioned them.

    DeepSpeed's hooks would gather them for every part, and ranks with fewer parts would not answer. The hooks also
    expect the modules in the order of the first pass.
    """
    parameters = [parameter for parameter in network.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    modules = [private(module) for module in network.modules()]
    hooks = [(found, dict(found)) for one in modules for found in (one.forward_pre_hooks, one.forward_hooks)]
    for found, _ in hooks:
        found.clear()
    try:
        with GatheredParameters(parameters):
            yield
    finally:
        for found, kept in hooks:
            found.update(kept)
