"""One micro step of a Llama-like decoder, simulated: every allocation of transformers' code, in order.

It follows ``modeling_llama.py`` (and those of the other `shardmake.memory.families`) of transformers 5.
`tests/unit/memory/test_decoder.py` compares it with a fake-tensor trace of that code.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from shardmake.config.attention import FLASH_KERNELS
from shardmake.memory import size_tensors as ops
from shardmake.memory.decoder_sizes import Decoder
from shardmake.memory.latent_attention import Turn, project
from shardmake.memory.linear_attention import attend
from shardmake.memory.model import SCORE_HEAD, TRAINED_HEAD, is_quantized
from shardmake.memory.scenario import BYTES, Scenario
from shardmake.memory.size_tensors import GradNode, Parameter, SizeStorage, SizeTensor, Tape, TensorEvent


def micro_step(scenario: Scenario) -> list[TensorEvent]:
    """Return the events of one forward and backward pass of ``scenario``'s decoder."""
    assert scenario.held_model.decoder is not None
    return DecoderStep(scenario, scenario.held_model.decoder).run()


def weights_of(scenario: Scenario, layers: Sequence[int]) -> dict[str, Parameter]:
    """Return the parameters by name, adapters included, as ``scenario`` trains and holds them, of these layers."""
    method, item = scenario.method_spec, weight_bytes(scenario)
    norm = 4 if scenario.widens_frozen and scenario.autocast else item
    found = {}
    for tensor in (one for one in scenario.held_model.tensors if one.block is None or one.block in layers):
        in_four_bits = method.in_four_bits and is_quantized(tensor)
        held = scenario.compute if in_four_bits else norm if tensor.kind == "norm" else item
        trained = not method.has_adapters and tensor.name not in scenario.split.frozen_names
        found[tensor.name] = Parameter(tensor.name, tensor.shape, held, trained, in_four_bits)
    item = BYTES[scenario.adapter_compute]
    adapters = (one for one in scenario.split.adapters if one.block is None or one.block in layers)
    return found | {one.name: Parameter(one.name, one.shape, item, trained=True) for one in adapters}


def weight_bytes(scenario: Scenario) -> int:
    """Return the bytes per element of the weights in the forward pass: fp32 under autocast, else the compute type.

    Under adapters the base model is in the compute type, except what a script casts for QLoRA. Hidden states have the
    embedding's type.
    """
    if not scenario.autocast:
        return scenario.compute
    return scenario.frozen if scenario.method_spec.has_adapters else 4


def layer_input(scenario: Scenario) -> int:
    """Return the bytes of each layer's input on a rank, which checkpointing keeps."""
    return scenario.tokens * scenario.model.hidden_size * weight_bytes(scenario)


class DecoderStep:
    """The parts of the model, in the order in which transformers runs them; only some ``layers`` if they are given."""

    def __init__(
        self,
        scenario: Scenario,
        shape: Decoder,
        weights: dict[str, Parameter] | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        self.scenario = scenario
        self.shape = self.whole = shape
        self.layers = layers or range(shape.layers)
        self.tokens = scenario.tokens
        self.weights = weights or weights_of(scenario, self.layers)
        self.tape = Tape()
        self.tape.autocast = scenario.compute if scenario.autocast else None
        self.embedding = f"{shape.root}.embed_tokens.weight"
        if scenario.model.tied and self.weights[self.embedding].trained:
            self.tape.used_twice[self.embedding] = None
        self.tape.holds_temporaries = not shape.all_levers  # the published rows of the others were compared without it
        self.sinks: Parameter | None = None
        self.fused_layers = scenario.fused_layers and shape.all_levers

    def run(self) -> list[TensorEvent]:
        """Return the events of the whole step."""
        tape = self.tape
        cosine_and_sine = self._positions()
        mask = self._mask()
        hidden = self._norm(self._run_layers(), f"{self.shape.root}.norm.weight")
        loss, logits = self._loss(hidden)
        if self.scenario.attention != "eager" or not self.scenario.checkpointing:
            mask = None  # else checkpointing holds it until the last layer has run again
        del hidden
        tape.casts.clear()  # autocast's cache ends with the forward pass; the graph keeps its saved tensors
        if self.scenario.extra_forwards:
            self._reference_pass()
        del logits
        tape.mark("backward")
        ops.backward(tape, loss)
        del loss, cosine_and_sine, mask
        return tape.events

    def _reference_pass(self) -> None:
        """Run the reference model, or the base model without its adapters, without a graph."""
        tape, trained = self.tape, self.weights
        self.weights = {name: replace(one, trained=False) for name, one in trained.items() if ".lora_" not in name}
        tape.recording = False
        cosine_and_sine, mask = self._positions(), self._mask()
        hidden = self._run_layers()
        self._loss(self._norm(hidden, f"{self.shape.root}.norm.weight"))
        del hidden, mask, cosine_and_sine
        tape.recording = True
        self.weights = trained

    def _positions(self) -> SizeStorage:
        """Return cosine and sine of the rotary embedding, which the products save; one copy for all sequences."""
        item = 4 if self.shape.wide_rotary else weight_bytes(self.scenario)
        width = self.shape.table_width // (2 if self.shape.half_tables else 1)
        return SizeStorage(self.tape, 2 * self.scenario.row_tokens * width * item)

    def _mask(self) -> SizeStorage | None:
        """Return the mask that all layers share: boolean for SDPA, in the compute type for eager attention."""
        scenario = self.scenario
        if scenario.attention in FLASH_KERNELS or (scenario.attention == "sdpa" and not scenario.masked):
            return None
        item = weight_bytes(scenario) if scenario.attention == "eager" else 1
        return SizeStorage(self.tape, self.shape.masks * scenario.micro_batch * scenario.sequence_length**2 * item)

    # -- layers

    def _run_layers(self) -> SizeTensor:
        hidden = self._embed()
        for index in self.layers:
            hidden = self._layer_with_marks(hidden, index)
        return hidden

    def _embed(self) -> SizeTensor:
        hidden = ops.embedding(self.tape, self.weights[self.embedding], self.tokens)
        if self.weights[self.embedding].shape[0] < self.shape.v:
            hidden = ops.scale(hidden)  # words of other ranks are set to zero in a copy
        if self.shape.scaled_embedding:
            hidden = ops.scale(hidden)
        if self.scenario.checkpointing and self.tape.recording and hidden.node is None:
            hidden = ops.root(hidden)  # enable_input_require_grads
            assert hidden.node is not None
            hidden.node.saved = [hidden.storage]  # AccumulateGrad holds its variable
        return self._scaled(hidden)

    def _layer_with_marks(self, hidden: SizeTensor, index: int) -> SizeTensor:
        self.tape.mark("forward", index)
        keeps_input = self.scenario.checkpointing and self.tape.recording
        out = (self._checkpointed if keeps_input else self._layer)(hidden, index)
        if out.node is not None:
            out.node.mark = ("backward block", index)
        self.tape.mark("forward end", index)
        return out

    def _checkpointed(self, hidden: SizeTensor, index: int) -> SizeTensor:
        """Keep only the input; the backward pass runs the layer again first (torch.utils.checkpoint).

        With ``activation_offload`` the input is copied to the host, and back before the layer runs again
        (``torch.autograd.graph.save_on_cpu``, which transformers and FSDP's ``offload_wrapper`` use). The input stays
        until that has ended; the published runs of models without experts were compared without it.
        """
        tape = self.tape
        tape.recording = False
        out = self._layer(hidden, index)
        tape.recording = True
        numel, item = hidden.numel, hidden.item
        kept: list[SizeStorage | None] = [None if self.scenario.activation_offload else hidden.storage]

        def function(grad: SizeTensor) -> list[SizeTensor | None]:
            first = len(tape.nodes)
            entry = ops.root(SizeTensor(tape, numel, item, storage=kept[0] if self.whole.experts else kept.pop()))
            inner = entry.node
            early = [self._scaled(grad)]  # it needs nothing of the layer, so it is computed before
            if self.whole.experts and index >= self.whole.dense and not (self.whole.shared or self.whole.gates):
                early.append(ops.new(grad, numel * self.whole.chosen))  # of the sum of a token's experts
            again = self._layer(entry, index, stops_early=True)
            tape.casts.clear()
            assert again.node is not None and inner is not None
            again.node.grad = grad
            del again, entry, grad, early
            ops.run_backward(tape, first)
            made, inner.grad = inner.grad, None
            return [made]

        out.node = GradNode([hidden.node], function)
        tape.nodes.append(out.node)
        return out

    def _layer(self, hidden: SizeTensor, index: int, stops_early: bool = False) -> SizeTensor:
        """Run a layer; a recomputation stops when everything is saved, before the last product and sum."""
        self.shape = self.whole.of_layers[index] if self.whole.of_layers else self.whole
        prefix, made = f"{self.shape.root}.layers.{index}", not stops_early or self.shape.layer_scalar
        names = [name and f"{prefix}.{name}.weight" for name in self.shape.norms]
        attended = self._attention(self._norm(hidden, names[0]), prefix, index)
        attended = self._scaled(self._norm(attended, names[1]))
        hidden = ops.add(hidden, attended)
        del attended
        normed = self._norm(hidden, names[2])
        feed = self._mixture if self.shape.experts and index >= self.shape.dense else self._mlp
        fed = feed(normed, f"{prefix}.mlp", made or bool(names[3]))
        del normed
        fed = self._scaled(self._norm(fed, names[3], made), made)
        out = ops.add(hidden, fed, made=made)
        return ops.scale_in_place(out) if self.shape.layer_scalar else out

    def _scaled(self, branch: SizeTensor, made: bool = True) -> SizeTensor:
        return ops.scale(branch, made=made) if self.shape.scaled_branches else branch

    def _norm(self, hidden: SizeTensor, name: str, made: bool = True) -> SizeTensor:
        """Run the norm ``name``; return ``hidden`` if the name is empty."""
        return self._rms_norm(hidden, self.weights[name], self.tokens, made) if name else hidden

    def _rms_norm(self, hidden: SizeTensor, weight: Parameter | None, rows: int, made: bool = True) -> SizeTensor:
        """Run transformers' RMSNorm, which computes in fp32 on an fp32 copy of the input."""
        if self.fused_layers and weight:
            return ops.fused_norm(hidden, weight, rows)
        wide = ops.cast(hidden, 4)
        factors = ops.row_rsqrt(ops.resized(ops.square(wide), rows), saves_sum=self.shape.value_norm)
        normed = ops.scale_rows(wide, factors)
        del wide, factors
        if weight is None:
            return ops.cast(normed, hidden.item, made)
        if self.shape.wide_norm:
            return ops.cast(ops.scale_columns(normed, replace(weight, item=4), made), hidden.item, made)
        return ops.scale_columns(ops.cast(normed, hidden.item), weight, made)

    def _attention(self, hidden: SizeTensor, layer: str, index: int) -> SizeTensor:
        shape, prefix = self.shape, f"{layer}.self_attn"
        whole: object = None
        if shape.linear:
            entry = ops.scale(hidden) if self.scenario.masked else hidden  # a copy without the padded tokens
            rows = self.scenario.micro_batch, self.scenario.row_tokens
            return attend(shape.linear, entry, rows, self.weights, f"{layer}.linear_attn", self._linear)
        if shape.latent:
            turn: Turn = ops.turn_pairs if shape.latent.pairs else partial(self._rotary, tables=[])
            query, key, value, whole = project(shape.latent, hidden, prefix, self._linear, self._norm, turn)
        elif "qkv" in shape.fused:
            whole = fused = self._linear(hidden, f"{prefix}.qkv_proj")
            query, key, value = (
                ops.view(fused, self.tokens * heads * shape.d) for heads in (shape.a, shape.k, shape.k)
            )
        else:
            query, key = (self._linear(hidden, f"{prefix}.{name}_proj") for name in "qk")
            value = key if shape.shares_keys else self._linear(hidden, f"{prefix}.v_proj")
        del hidden
        if shape.gates:
            query, gate = ops.split(query)
            gate = ops.copy(gate)
        if shape.qk_norm != "none":
            heads = (shape.a, shape.k) if shape.qk_norm == "head" else (1, 1)
            query = self._rms_norm(query, self.weights[f"{prefix}.q_norm.weight"], self.tokens * heads[0])
            key = self._rms_norm(key, self.weights[f"{prefix}.k_norm.weight"], self.tokens * heads[1])
        value = self._rms_norm(value, None, self.tokens * shape.k) if shape.value_norm else value
        if index not in shape.unrotated and not shape.latent:
            size = self.scenario.row_tokens * shape.rotated * (4 if shape.wide_rotary else weight_bytes(self.scenario))
            tables = [SizeStorage(self.tape, size) for _ in range(2 * shape.interleaved)]
            query, key = self._rotary(query, tables), self._rotary(key, tables)
            del tables
        self.sinks = self.weights.get(f"{prefix}.sinks")
        mixed = self._mix(query, key, value)
        if shape.gates:
            mixed = ops.multiply(mixed, ops.activation(gate, saves_output=True))
        del query, key, value, whole
        return ops.dropout(self._linear(mixed, f"{prefix}.o_proj"), shape.dropout[1])

    def _rotary(self, tensor: SizeTensor, tables: list[SizeStorage]) -> SizeTensor:
        """Run ``x cos + rotate_half(x) sin``; under autocast cos, sin and the result are fp32.

        Liger's kernel rotates in place.
        """
        if self.fused_layers:
            return tensor
        shape = self.shape
        item = 4 if self.tape.autocast or shape.wide_rotary else tensor.item
        turning = ops.view(tensor, tensor.numel * shape.rotated // shape.d) if shape.joins_rotated else tensor
        turned = ops.rotate_half(turning)
        if shape.wide_rotary and shape.interleaved:
            turning, turned = ops.cast(turning, 4), ops.cast(turned, 4)
        straight = ops.scale(turning, item, saved=tables[:1])
        turned = ops.scale(turned, item, saved=tables[1:])
        rotated = ops.add(straight, turned)
        if shape.joins_rotated:
            del straight, turned
            rest = ops.view(tensor, tensor.numel - turning.numel)
            return ops.join(rotated, ops.cast(rest, item))
        return ops.cast(rotated, tensor.item) if shape.wide_rotary else rotated

    def _mix(self, query: SizeTensor, key: SizeTensor, value: SizeTensor) -> SizeTensor:
        scenario = self.scenario
        if scenario.attention == "eager":
            return self._eager(query, key, value)
        query, key, value = (ops.cast(tensor, self.tape.autocast or tensor.item) for tensor in (query, key, value))
        if scenario.sequence_parallel > 1:
            query, key, value = (self._exchange(tensor) for tensor in (query, key, value))
        masked = scenario.attention == "sdpa" and scenario.masked
        if scenario.expands_keys:
            key, value = self._repeat(key), self._repeat(value)
        mask = scenario.micro_batch * scenario.sequence_length**2 if masked else 0
        out = ops.fused_attention(query, key, value, self.tokens * self.shape.a, mask, flash=not masked)
        if scenario.sequence_parallel > 1:
            out = self._exchange(out)
        return out

    def _exchange(self, tensor: SizeTensor) -> SizeTensor:
        """Run Ulysses' exchange of tokens and heads: a contiguous copy, the all-to-all, a copy in the kernel's order.

        DeepSpeed 0.19.8, ``UlyssesSPAttentionHF``. A rank has as many numbers after it as before.
        """
        return ops.copy(ops.copy(ops.copy(tensor)))

    def _repeat(self, tensor: SizeTensor) -> SizeTensor:
        return ops.resized(tensor, tensor.numel * (self.shape.a // self.shape.k))

    def _eager(self, query: SizeTensor, key: SizeTensor, value: SizeTensor) -> SizeTensor:
        scores = self.tokens * self.shape.a * self.scenario.sequence_length
        key, value = self._repeat(key), self._repeat(value)
        if self.shape.latent and self.scenario.micro_batch > 1:
            value = ops.copy(value)  # rows of several sequences that lie beside keys
        return ops.eager_attention(
            query, key, value, scores, weight_bytes(self.scenario), softcap=self.shape.softcaps, sinks=self.sinks,
            probability=self.shape.dropout[0],
        )  # fmt: skip

    def _mlp(self, hidden: SizeTensor, prefix: str, made: bool) -> SizeTensor:
        names = f"{prefix}.gate_proj", f"{prefix}.up_proj"
        if "gate" in self.shape.fused:
            product = ops.gated(self._linear(hidden, f"{prefix}.gate_up_proj"))
        elif self.fused_layers:
            product = ops.fused_product(*(self._linear(hidden, name) for name in names))
        else:  # no name here keeps gate and up
            product = ops.multiply(ops.activation(self._linear(hidden, names[0])), self._linear(hidden, names[1]))
        probability = self.shape.dropout[1]
        return ops.dropout(self._linear(product, f"{prefix}.down_proj", made or probability > 0), probability)

    def _mixture(self, hidden: SizeTensor, prefix: str, made: bool) -> SizeTensor:
        """Run the experts, and those that every token is sent to."""
        if self.shape.gates:
            shared = self._mlp(hidden, f"{prefix}.shared_expert", made=True)
            out = self._experts(hidden, prefix, made=True)
            gate = ops.activation(self._linear(hidden, f"{prefix}.shared_expert_gate"), saves_output=True)
            return ops.add(out, ops.scale_rows(shared, gate), made)
        out, name = self._experts(hidden, prefix, made or self.shape.shared > 0), f"{prefix}.shared_experts"
        return ops.add(out, self._mlp(hidden, name, made), made) if self.shape.shared else out

    def _experts(self, hidden: SizeTensor, prefix: str, made: bool) -> SizeTensor:
        """Run transformers' ``grouped_mm_experts_forward``: rows sorted by expert, then in their order again."""
        shape, tape, items = self.shape, self.tape, self.weights
        pairs = self.tokens * shape.chosen
        logits, weights, chosen = self._route(hidden, prefix)
        up, down = (f"{prefix}.experts.{name}_proj" for name in ("gate_up", "down"))
        read_down, read_up = (ops.adapted(tape, items, name) for name in (down, up))
        ids, order, counted = (SizeStorage(tape, item * pairs) for item in (8, 8, 4))
        rows = ops.resized(hidden, pairs * shape.h, [SizeStorage(tape, 8 * pairs)])
        weights = ops.resized(weights, pairs, [order])
        bias = items.get(f"{up}_bias")
        held = bias and SizeStorage(tape, 2 * shape.f * pairs * bias.item)
        product = ops.grouped(rows, read_up(), 2 * shape.f, shape.h, bias)
        product = (ops.clamped_gated if shape.experts == "softmax last" else ops.gated)(product)
        bias = items.get(f"{down}_bias")
        held = bias and SizeStorage(tape, shape.h * pairs * bias.item)
        product = ops.grouped(product, read_down(), shape.h, shape.f, bias)
        weighted = ops.scale_rows(product, weights)
        weighted = ops.resized(weighted, pairs * shape.h, [SizeStorage(tape, 8 * pairs)], made)
        out = ops.resized(weighted, self.tokens * shape.h, made=made)
        out = ops.cast(out, hidden.item, made)
        del logits, chosen, ids, counted, held
        return out

    def _route(self, hidden: SizeTensor, prefix: str) -> tuple[SizeTensor, SizeTensor, SizeStorage]:
        """Return the logits of the router, and weights and numbers of the experts that each token is sent to."""
        shape, tape, pairs = self.shape, self.tape, self.tokens * self.shape.chosen
        chosen = SizeStorage(tape, 8 * pairs)
        if shape.experts == "softmax last":
            logits = self._linear(hidden, f"{prefix}.router")
            return logits, ops.softmax(ops.resized(logits, pairs, [chosen]), logits.item), chosen
        weight = ops.adapted(tape, self.weights, f"{prefix}.gate.weight")()
        if shape.experts == "sigmoid":  # of products in fp32; the scores are corrected before some are chosen
            copied = None if weight.item == 4 else SizeStorage(tape, 4 * weight.numel)
            logits = ops.linear(ops.cast(hidden, 4), replace(weight, item=4))
            scores = ops.activation(logits, saves_output=True)
            corrected = [SizeStorage(tape, 4 * scores.numel) for _ in range(3)]
            del corrected
            weights = ops.resized(scores, pairs, [chosen, copied, SizeStorage(tape, 4 * pairs)])
            return logits, ops.scale(weights), chosen
        logits = ops.linear(hidden, weight)
        probabilities = ops.softmax(ops.cast(logits, 4) if shape.wide_routing else logits, 4)
        weights = ops.resized(probabilities, pairs, [chosen, SizeStorage(tape, 4 * pairs)])
        return logits, weights if shape.wide_routing else ops.cast(weights, logits.item), chosen

    def _linear(self, hidden: SizeTensor, module: str, made: bool = True) -> SizeTensor:
        weight = self.weights[f"{module}.weight"]
        is_adapted = f"{module}.lora_A.weight" in self.weights
        made = made or is_adapted
        out = ops.linear(hidden, weight, self.weights.get(f"{module}.bias"), made)
        if weight.in_four_bits:  # bitsandbytes' Linear4bit returns its input's type
            out = ops.cast(out, hidden.item, made)
        return self._adapted(hidden, out, module) if is_adapted else out

    def _adapted(self, hidden: SizeTensor, out: SizeTensor, module: str) -> SizeTensor:
        """Run PEFT's LoRA: cast the input to the adapter's type, apply dropout, add the product to the base's."""
        item = out.item
        first, second = (self.weights[f"{module}.lora_{part}.weight"] for part in "AB")
        narrow = ops.dropout(ops.cast(hidden, first.item), self.scenario.lora_dropout)
        narrow = ops.linear(narrow, first)
        wide = ops.scale(ops.linear(narrow, second))
        del narrow
        return ops.cast(ops.add(out, wide), item)

    # -- loss

    def _loss(self, hidden: SizeTensor) -> tuple[SizeTensor, SizeTensor | None]:
        self.tape.mark("loss")
        if self.scenario.model.is_classifier:
            return self._score(hidden), None
        head = self.weights.get("lm_head.weight") or self.weights[self.embedding]
        if loss := ops.HEAD_LOSSES.get("log_probs" if self.scenario.log_probs else self.scenario.loss):
            return loss(hidden, head, self.shape.v), None
        if head.shape[0] < self.shape.v and self.scenario.model.tied:
            logits = ops.linear(hidden, head)
            return ops.vocab_parallel_loss(logits, self.tokens), logits
        return self._cross_entropy(self._whole_logits(hidden, head))  # no name here would keep them

    def _whole_logits(self, hidden: SizeTensor, head: Parameter) -> SizeTensor:
        """Return the logits of all words, of which the rows of ``head`` are this rank's."""
        logits = self._scaled(ops.linear(hidden, head))
        for step in ops.SOFTCAP if self.shape.caps_logits else ():
            logits = step(logits)
        if head.shape[0] == self.shape.v:
            return logits
        return ops.gather(logits, self.scenario.tensor_parallel, self.tokens * self.shape.v)

    def _score(self, hidden: SizeTensor) -> SizeTensor:
        """Run ``GenericForSequenceClassification``: a score of every token, of which the last one of a row is taken."""
        head = self.weights.get(f"{TRAINED_HEAD}.weight") or self.weights[f"{SCORE_HEAD}.weight"]
        rows = self.scenario.micro_batch
        indices = [SizeStorage(self.tape, 8 * rows), SizeStorage(self.tape, 8 * rows)]
        return ops.resized(ops.linear(hidden, head), rows, indices)

    def _cross_entropy(self, logits: SizeTensor) -> tuple[SizeTensor, SizeTensor | None]:
        """Run ``ForCausalLMLoss``: logits in fp32, log-softmax, nll; the caller may keep the 16-bit logits.

        Each step's tensor is a variable of the library's function as well, so that all live until the function returns.
        """
        wide = ops.cast(logits, 4)
        return ops.nll_of_log_softmax(wide, self.tokens), logits
