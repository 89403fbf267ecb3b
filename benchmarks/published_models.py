"""The config.json of each model in the file of published measurements."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any


def llama_like(
    hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, **more: object
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary,
        "max_position_embeddings": 131072, **more,
    }  # fmt: skip


_TIED = {"tie_word_embeddings": True}
_LLAMA_3B = llama_like(3072, 8192, 28, 24, 8, 128256, head_dim=128, **_TIED)
_LLAMA_8B = llama_like(4096, 14336, 32, 32, 8, 128256)
_QWEN2 = {"model_type": "qwen2"}  # Qwen 1 is a Qwen 2 without grouped heads (its c_attn is q, k and v in one)
_QWEN25_7B = llama_like(3584, 18944, 28, 28, 4, 152064, **_QWEN2)
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": llama_like(4096, 11008, 32, 32, 32, 32000),
    "Llama-2-13B": llama_like(5120, 13824, 40, 40, 40, 32000),
    "Llama-2-70B": llama_like(8192, 28672, 80, 64, 8, 32000),
    "Llama-3-8B": _LLAMA_8B,
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-8B-Instruct": _LLAMA_8B,
    "Llama-3.1-70B": llama_like(8192, 28672, 80, 64, 8, 128256),
    "Llama-3.1-405B": llama_like(16384, 53248, 126, 128, 8, 128256),
    "meta-llama/Llama-3.2-3B": _LLAMA_3B,
    "Llama-3.2-3B": _LLAMA_3B,
    "Mistral-7B-v0.3": llama_like(4096, 14336, 32, 32, 8, 32768, model_type="mistral"),
    "Mistral-7B": llama_like(4096, 14336, 32, 32, 8, 32000, model_type="mistral"),
    "Mixtral-8x7B": {
        **llama_like(4096, 14336, 32, 32, 8, 32000, model_type="mixtral", architectures=["MixtralForCausalLM"]),
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
    "PowerLM-3b": llama_like(
        2304, 9216, 40, 36, 36, 49152, model_type="granite", architectures=["GraniteForCausalLM"], **_TIED
    ),
    "gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        **{"n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192, "n_positions": 2048, "vocab_size": 49280},
    },
    "Yi-34B": llama_like(7168, 20480, 60, 56, 8, 64000),
    "TinyLlama-1.1B": llama_like(2048, 5632, 22, 32, 4, 32000),
    "SmolLM2-360M": llama_like(960, 2560, 32, 15, 5, 49152, **_TIED),
    "SmolLM2-1.7B": llama_like(2048, 8192, 24, 32, 32, 49152, **_TIED),
    "gemma-1.1-2b-it": llama_like(2048, 16384, 18, 8, 1, 256000, model_type="gemma", head_dim=256),
    "Qwen3-4B": llama_like(2560, 9728, 36, 32, 8, 151936, model_type="qwen3", **_TIED),
    "DeepSeek-R1-0528-Qwen3-8B": llama_like(4096, 12288, 36, 32, 8, 151936, model_type="qwen3"),
    "Qwen2.5-0.5B-Instruct": llama_like(896, 4864, 24, 14, 2, 151936, **_TIED, **_QWEN2),
    "Qwen2.5-1.5B-Instruct": llama_like(1536, 8960, 28, 12, 2, 151936, **_TIED, **_QWEN2),
    "Qwen2.5-3B-Instruct": llama_like(2048, 11008, 36, 16, 2, 151936, **_TIED, **_QWEN2),
    "Qwen2.5-7B": _QWEN25_7B,
    "Qwen2.5-7B-Instruct": _QWEN25_7B,
    "Qwen2.5-32B": llama_like(5120, 27648, 64, 40, 8, 152064, **_QWEN2),
    "Qwen-1.8B": llama_like(2048, 5504, 24, 16, 16, 151936, **_QWEN2),
    "Qwen-7B": llama_like(4096, 11008, 32, 32, 32, 151936, **_QWEN2),
    "Qwen-14B": llama_like(5120, 13696, 40, 40, 40, 152064, **_QWEN2),
    "Qwen-72B": llama_like(8192, 24576, 80, 64, 64, 152064, **_QWEN2),
}


@cache
def folder() -> Path:
    """Return a folder that lasts as long as the system keeps temporary files."""
    return Path(tempfile.mkdtemp(prefix="shardmake-accuracy-"))


def config_file(name: str) -> str:
    """Return the path of the model's config.json.

    Raises:
        KeyError: The model is not listed.
    """
    path = folder() / name.replace("/", "--") / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(CONFIGS[name]))
    return str(path)


def deepspeed_file(**sizes: object) -> str:
    """Return the path of a DeepSpeed file with ``sizes`` in its section ``zero_optimization``."""
    path = folder() / f"zero-{abs(hash(tuple(sizes.items())))}.json"
    path.write_text(json.dumps({"zero_optimization": sizes}))
    return str(path)
