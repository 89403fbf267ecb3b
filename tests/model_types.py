"""Try model types of transformers in a small size: what the plan knows of each, one training step, and one merge.

``python -m tests.model_types KNOWN.json [TYPE ...]`` tries types that the file does not have, all without a name, and
adds what was found. ``tools.model_types_page`` writes the page of it.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from shardmake.consolidate import loading
from shardmake.consolidate.merge import consolidate
from shardmake.core.errors import ShardmakeError
from shardmake.memory.parameter_inventory import find_class, in_one_line, parse_config
from shardmake.memory.read_config import float_or_object
from shardmake.plan import inspect_model
from shardmake.plan.small_config import Narrow, shrunk
from shardmake.run.model_class import ModelClass
from shardmake.run.text_part import towers

Row = dict[str, Any]
LARGEST = 300_000_000
"""Parameters of a model that is small enough to be saved and merged here."""
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
PUBLISHED: dict[str, Row] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm46v": {"text_config": {"rope_parameters": _GLM_ROPE}}, "glm4v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": _GLM_ROPE, "head_dim": 128}},
    "glmga": {"text_config": {"rope_parameters": _GLM_ROPE}}, "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128}, "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128}, "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "step3p7": {"text_config": {"sliding_window": 512}},
}  # fmt: skip
"""Values that published models have, where the defaults of the type cannot be built or run."""


def model_types() -> list[str]:
    """Return every type of transformers with a class that generates text."""
    tasks = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    return sorted({kind for task in tasks for kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")})


def default_values(kind: str) -> Row:
    """Return the values of the default config of ``kind``, with those of `PUBLISHED`; a config class may raise anything."""
    values = json.loads(AutoConfig.for_model(kind).to_json_string(), object_hook=float_or_object)
    for name, value in PUBLISHED.get(kind, {}).items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    return values


def try_type(kind: str, folder: Path) -> Row:
    """Return what the plan knows of ``kind`` and what a step and a merge of a small model gave."""
    try:
        values = default_values(kind)
    except Exception as error:  # a config class may raise anything
        return {"refused": f"Its config has no defaults: {in_one_line(error)}"}
    values.pop("architectures", None)
    request = {"config": values, "source": "config.json", "trust_remote_code": False, "about": "class"}
    try:
        found = inspect_model.answer(request)
        config = parse_config(values, "config.json", False)
        chosen = find_class(values, config, "config.json", False)
    except ShardmakeError as error:
        return {"refused": " ".join(str(error).removeprefix("Model cannot be trained: ").split())}
    except Exception as error:  # a model's code may raise anything
        return {"refused": f"Its code raised {type(error).__name__}: {in_one_line(error)}"}
    row = {name: found[name] for name in ("model_class", "absent", "attention", "mixing")}
    return {**row, "tested": _step_and_merge(chosen, config, folder)}


def _step_and_merge(chosen: ModelClass, config: Any, folder: Path) -> str:
    """Return what was tested, or where it failed."""
    base, checkpoint, out = (folder / name for name in ("base", "checkpoint", "out"))
    stage = "a small model"
    try:
        whole = _small_whole(chosen, config)
        whole.save_pretrained(base)
        stage = "loading"
        part = chosen.load(str(base), dtype=torch.float32)
        stage = "the step"
        part.config.use_cache = False
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
        ids = torch.arange(1, 33).view(2, 16)
        part.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        part.save_pretrained(checkpoint, save_original_format=False)
        stage = "the merge"
        consolidate(checkpoint, out, base=base, model_class=chosen, workers=1)
        opened, info = chosen.whole.find().from_pretrained(out, output_loading_info=True, dtype=torch.float32)
        with torch.no_grad():
            ours, theirs = (model.eval()(input_ids=ids, use_cache=False).logits for model in (opened, part))
        state, before = opened.state_dict(), whole.state_dict()
        absent = tuple(towers(whole)) if chosen.text_part else ()
        kept = [name for name in state if absent and name.startswith(absent)]
        if any(info.values()) or not torch.allclose(ours, theirs, atol=1e-5):
            return "failed: the merged model is another one"
        if not all(torch.equal(state[name], before[name]) for name in kept):
            return "failed: the towers changed"
    except Exception as error:  # a model's code may raise anything
        return f"failed at {stage}: {in_one_line(error).replace(f'{folder}/', '')[:200]}"
    return "a step, its merge"


def _small_whole(chosen: ModelClass, config: Any) -> Any:
    raised: Exception = ValueError("no small sizes suit it")
    for narrow in get_args(Narrow):
        try:
            small = type(config).from_dict(shrunk(config.to_dict(), narrow=narrow))
            with torch.device("meta"):
                size = chosen.whole.build(small).num_parameters()
            if size > LARGEST:
                raised = ValueError(f"its small model has {size:,} parameters")
                continue
            torch.manual_seed(0)
            model = chosen.whole.build(small, dtype=torch.float32)
            model(input_ids=torch.arange(1, 9).view(1, 8), use_cache=False)
            return model
        except Exception as error:  # the sizes do not suit this class
            raised = error
    raise raised


def in_this_process(_module: str, request: Any, *_: Any) -> Any:
    """Answer the merge's questions about a model here: a process for each imports transformers, which takes longer."""
    return json.loads(json.dumps(loading.answer(request)))


def main() -> None:
    """Try the types that are named, or all, and keep what is found after each."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loading.run_module = in_this_process
    path, names = Path(sys.argv[1]), sys.argv[2:] or model_types()
    known: dict[str, Row] = json.loads(path.read_text()) if path.is_file() else {}
    for kind in names:
        if kind in known:
            continue
        folder = Path(tempfile.mkdtemp())
        known[kind] = try_type(kind, folder)
        shutil.rmtree(folder)
        path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        print(kind, known[kind].get("tested") or known[kind]["refused"], flush=True)


if __name__ == "__main__":
    main()
