"""Write the demo's inputs: a data set, a tokenizer, and a model small enough to train on a laptop's CPU."""

import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmake.core.atomic import write_bytes, write_text
from shardmake.core.environment import hidden
from shardmake.core.temporary import temporary_folder
from shardmake.demo.requests import make_requests

logger = logging.getLogger(__name__)
Conversation = dict[str, list[dict[str, str]]]
TRAINING, EVALUATION = 4000, 200
"""Examples."""
VOCABULARY_SIZE = 704
"""Rows of the embedding; the tokenizer needs fewer."""
CONTEXT_LENGTH = 1024
END_OF_TEXT, TURN_BEGINS, TURN_ENDS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_inputs(folder: Path = Path("resources/demo"), seed: int = 0) -> None:
    """Write ``train.jsonl``, ``eval.jsonl`` and ``base`` (model and tokenizer) into ``folder``.

    The files are equal, byte for byte, for one seed and one version of Python and the libraries; unchanged files are
    not rewritten.
    """
    rng = random.Random(seed)
    conversations = [request.conversation(rng) for request in make_requests(TRAINING + EVALUATION, rng)]
    train, evaluation = conversations[EVALUATION:], conversations[:EVALUATION]
    write_text(folder / "train.jsonl", as_jsonl(train))
    write_text(folder / "eval.jsonl", as_jsonl(evaluation))
    logger.info(f"demo: {TRAINING:,} training and {EVALUATION:,} evaluation conversations in {folder}")
    make_base(folder / "base", train, seed)


def make_base(folder: Path, conversations: Sequence[Conversation], seed: int) -> None:
    """Write an untrained model and a tokenizer for the words of ``conversations`` into ``folder``."""
    with temporary_folder("demo") as temporary:
        tokens = _make_tokenizer(conversations, temporary)
        parameters = _make_model(temporary, seed)
        for path in sorted(temporary.iterdir()):
            write_bytes(folder / path.name, path.read_bytes())
    logger.info(f"demo: tokenizer of {tokens:,} tokens in {folder}")
    logger.info(f"demo: untrained Llama of {parameters / 1e6:.1f} million parameters in {folder}")


def as_jsonl(examples: Iterable[Mapping[str, Any]]) -> str:
    """Return one JSON object a line."""
    return "".join(json.dumps(example) + "\n" for example in examples)


def _make_tokenizer(conversations: Sequence[Conversation], folder: Path) -> int:
    """Train a byte-level BPE whose tokens are words with a space before them, save it, and return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_BEGINS, TURN_ENDS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    messages = [message for conversation in conversations for message in conversation["messages"]]
    tokenizer.train_from_iterator((text for message in messages for text in message.values()), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_ENDS,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_BEGINS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
    ).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def _make_model(folder: Path, seed: int) -> int:
    """Save a randomly initialised Llama; return its number of parameters."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    with hidden("deepspeed"):  # Accelerate would import it, which takes seconds and prints a warning
        model.save_pretrained(folder)
    return model.num_parameters()
