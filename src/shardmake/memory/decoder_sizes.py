"""The operators and sizes of a Llama-like decoder."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardmake.memory.latent_attention import Latent
from shardmake.memory.linear_attention import LinearAttention

QueryNorm = Literal["none", "head", "row"]
"""The norm of queries and keys: none, one for each head, or one for all heads of a token."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The operators of a Llama-like decoder; defaults are Llama's."""

    norms: tuple[str, ...] = ("input_layernorm", "", "post_attention_layernorm", "")
    """The norms before and after attention, and before and after the MLP; empty for none."""
    qk_norm: QueryNorm = "none"
    wide_norm: bool = False
    """The norm multiplies by its weight in fp32, then casts back."""
    wide_rotary: bool = False
    """Rotary tables and products are fp32."""
    interleaved: bool = False
    """Each layer makes rotary tables for pairs of neighbours."""
    joins_rotated: bool = False
    """The rotated part of a head is joined to the rest, even if nothing remains."""
    half_tables: bool = False
    """Halves of a head are rotated with tables of that width."""
    fused: tuple[str, ...] = ()
    """One matrix for queries, keys and values (``qkv``), or for both sides of the MLP (``gate``)."""
    scaled_embedding: bool = False
    """The embedding multiplies its rows by a number."""
    scaled_branches: bool = False
    """Hidden states, what attention and the MLP add, and the logits are multiplied by numbers."""
    softcaps: bool = False
    """Scores of eager attention pass through tanh."""
    sinks: bool = False
    """Eager attention has one more score for each head."""
    value_norm: bool = False  # values pass through a norm without a weight; norms save what they take the root of, too
    layer_scalar: bool = False  # a number that is not trained multiplies what a layer returns, in place
    experts: Literal["", "softmax first", "softmax last", "sigmoid"] = ""
    """A mixture, and its router: a softmax of all experts, of the chosen ones after biased products, or a sigmoid."""
    wide_routing: bool = False  # the weights of the chosen experts stay in fp32
    projections: tuple[str, ...] = ()
    """Some layers have linear attention, with these `LinearAttention.projections`."""
    gates: bool = False  # sigmoid gates multiply what attention and the shared expert give
    all_levers: bool = False
    """Liger's layers, a rank's part of the matrices, and the sequence classifier are written down, too."""


@dataclass(frozen=True)
class Decoder(Style):
    """The sizes of a Llama-like decoder, in the notation of the papers.

    h hidden, f intermediate (of an expert), a heads, k key-value heads, d head dimension, L layers, v vocabulary.
    """

    h: int
    f: int
    a: int
    k: int
    d: int
    layers: int
    v: int
    root: str = "model"
    """Module of the embedding and the layers."""
    rotated: int = 0
    """Numbers of a head that the rotary embedding turns."""
    unrotated: frozenset[int] = frozenset()
    """Layers without a rotary embedding."""
    table_width: int = 0
    """Columns of the rotary tables, one for each kind of layer if those differ."""
    caps_logits: bool = False  # logits pass through tanh
    shares_keys: bool = False  # the products for keys are those for values, too
    of_layers: "tuple[Decoder, ...]" = ()
    """The sizes of each layer, if they differ."""
    linear: LinearAttention | None = None
    """Layers have this in place of attention; of a whole model, some layers."""
    masks: int = 1
    """Masks that exist at once, one for each kind of attention."""
    count: int = 0
    """Experts of a layer."""
    chosen: int = 0
    """Experts that a token is sent to."""
    dense: int = 0  # first layers without experts
    shared: int = 0  # features of the experts that every token is sent to
    dropout: tuple[float, float] = (0.0, 0.0)
    """Probabilities for the scores of eager attention, and for what attention and the MLP add."""
    latent: Latent | None = None

    @property
    def width(self) -> float:
        """Mean width of a head of keys and of one of values."""
        return (self.d + self.latent.value) / 2 if self.latent else self.d

    @cached_property
    def attention_width(self) -> float:
        """Features of the heads of all layers with an attention kernel."""
        layers = self.of_layers or (self,) * self.layers
        return sum(one.a * one.width for one in layers if not one.linear)
