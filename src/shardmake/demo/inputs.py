"""Write the demo's inputs: real data, a real tokenizer and a model small enough to train on a laptop's CPU."""

import json
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path

from shardmake.core.atomic import write_bytes, write_text
from shardmake.demo.docstrings import DocstringEntry, collect, split

logger = logging.getLogger(__name__)
VOCABULARY_SIZE = 4096
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
    not rewritten. Raises `DataError` if the standard library's sources are not installed.
    """
    logger.info("demo: reading the docstrings of Python's standard library")
    train, evaluation = split(collect(), seed)
    write_text(folder / "train.jsonl", _as_jsonl(train))
    write_text(folder / "eval.jsonl", _as_jsonl(evaluation))
    logger.info(f"demo: {len(train):,} training and {len(evaluation):,} evaluation conversations in {folder}")
    with tempfile.TemporaryDirectory() as temporary:
        _make_tokenizer(train, Path(temporary))
        parameters = _make_model(Path(temporary), seed)
        for path in sorted(Path(temporary).iterdir()):
            write_bytes(folder / "base" / path.name, path.read_bytes())
    logger.info(f"demo: tokenizer of {VOCABULARY_SIZE:,} tokens in {folder / 'base'}")
    logger.info(f"demo: untrained Llama of {parameters / 1e6:.1f} million parameters in {folder / 'base'}")


def _as_jsonl(entries: Iterable[DocstringEntry]) -> str:
    return "".join(json.dumps(entry.conversation(), ensure_ascii=False) + "\n" for entry in entries)


def _make_tokenizer(entries: Iterable[DocstringEntry], folder: Path) -> None:
    """Train a byte-level BPE on the conversations and save it as a Hugging Face tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_BEGINS, TURN_ENDS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for entry in entries for message in entry.conversation()["messages"]]
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_ENDS,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_BEGINS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
    ).save_pretrained(folder)


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
    model.save_pretrained(folder)
    return model.num_parameters()
