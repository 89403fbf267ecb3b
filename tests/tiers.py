"""The tests of ``make test``: unit tests, and at least one of each family of process tests and Slurm tests.

All other tests get the marker ``full`` and run in ``make test-all``. The longest of them also get the marker ``long``:
with CI=true they are left out.
"""

import re

QUICK = {
    "cluster/test_end_to_end.py": "two_nodes_from_config_to_pushed_model",
    "cluster/test_harness.py": "all_nodes_are_idle|step_runs_on_two_hosts|gloo_work_across_nodes",
    "workflow/test_collectives.py": "on_the_page.zero3|every_function",
    "workflow/test_consolidate_bad_input.py": "missing rank|truncated file|flipped bit in a shard|two_merges",
    "workflow/test_consolidate_memory.py": "70B",
    "workflow/test_consolidate_outputs.py": "save_pretrained|receipt|damage_is|unusual|one_different_bit",
    "workflow/test_consolidate_trained.py": "-3ranks|another_model|several_adapters",
    "workflow/test_doctor.py": "two_nodes_meet",
    "workflow/test_engine_truth.py": r"(batch|steps): DeepSpeed auto\]|a script without a GPU\]|predicted.clipping in",
    "workflow/test_evaluate.py": "loss_is_the_mean|same_tokens|share_the_sequences.whole|fastest_way",
    "workflow/test_fetch_data.py": "pinned_to_the_commit",
    "workflow/test_local.py": "from_config_to_pushed_model",
    "workflow/test_loop.py": "equals_trainer.*zero2",
    "workflow/test_reruns.py": "cannot_change|changes.learning|takes_effect",
    "workflow/test_reshard.py": "zero3x2-fsdpx3-zero2x2",
    "workflow/test_recipes.py": r"merges.fp32-(zero3|fsdp)\]",
    "workflow/test_saving.py": "damaged_shards|shared_disk_fills_up",
    "workflow/test_script.py": "unplanned_engine",
    "workflow/test_script_adapters.py": "fsdp2 by Trainer",
    "workflow/test_script_guard.py": "train_as_planned.zero2-hf_trainer.py--0|refused.zero2-hf_trainer.py--zero_stage",
    "workflow/test_sharing.py": "one_cache",
    "workflow/test_snakemake.py": "dry_run_shows|another_version|configuration_of_the_clone|without_python.*alias",
}
"""Part of a test's name (a regular expression), by file below ``tests``; an empty one matches every test."""


SLOW_UNIT = {
    "unit/launch/test_preflight.py": "imports_flash_attention",
    "unit/plan/test_abilities.py": "auto_takes|answers_as_a_process",
    "unit/plan/test_before_the_queue.py": "sound_run.*(gpt2|bloom)",
    "unit/plan/test_suggestions.py": "long_sequences_fit",
    "unit/render/test_lint.py": "any_value_in_any_key",
    "unit/tools/test_hashed_requirements.py": "",
    "unit/memory/test_trace.py": "can_be_traced.(qwen2_moe|gpt_neox|t5)|unroll_to_the_full_trace.(gpt2-.*lora|mixtral)",
    "unit/memory/test_token_loops.py": "peaks_of_the_whole",
    "unit/memory/test_preferences.py": "matches_the_recorded_one.((reward )?(autocast|fp32|lora|qlora)|tied|reward (masked|gemma))",
    "unit/memory/test_estimate.py": "outside_the_families_is_traced",
}
"""Unit tests that take many seconds while others of their kind stay in ``make test``."""


LONG = {
    "cluster/test_container.py": "",
    "cluster/test_service.py": "",
    "unit/memory/test_preferences.py": "",
    "unit/memory/test_token_loops.py": "",
    "unit/render/test_lint.py": "",
    "workflow/test_added_tokens.py": "offload",
    "workflow/test_chain.py": "",
    "workflow/test_command_failures.py": "read-only",
    "workflow/test_evaluate.py": "lm_eval|overflows|offload",
    "workflow/test_gpu_kit.py": "doctor_trains",
    "workflow/test_loading.py": "zero3",
    "workflow/test_local.py": "stop_file|diverges_twice",
    "workflow/test_loop.py": "compiled|ddp",
    "workflow/test_objectives.py": "kto|reward|qlora|lora|zero3",
    "workflow/test_rates.py": "tokens.zero",
    "workflow/test_recipes.py": r"on_the_host.*zero|bf16.*(offload|zero1)|mixture.*zero2|(moe|olmoe)-zero[12]|8bit|qlora-ddp",
    "workflow/test_reruns.py": "content_changes",
    "workflow/test_reshard.py": "zero3x4|fsdpx4",
    "workflow/test_saving.py": r"planned_host_ram.zero[12]",
    "workflow/test_script.py": "secrets",
    "workflow/test_snakemake.py": "says_how_to_resume|reach_every_stage",
    "workflow/test_strategies.py": r"printed_command|within_two_nodes|of_two_ranks.zero1",
}
"""The longest tests of ``make test-all``, and some of their families: CI, which takes about 40 minutes, omits them."""

SAMPLED_FAMILIES = ("deepseek_v3", "gemma4", "gpt_oss", "qwen3_5_moe", "smollm3")
"""Families that CI takes through every stage; the demo and other tests are Llamas."""
FAMILIES = (
    *SAMPLED_FAMILIES, "apertus", "cohere2", "deepseek_v2", "ernie4_5", "exaone4", "falcon_h1",
    "gemma2", "gemma3", "glm4", "glm4_moe", "glm_moe_dsa", "granite", "hy_v3", "kimi_k25", "kimi_linear", "lfm2",
    "llama4", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl", "mistral", "mistral3", "mixtral", "nemotron_h", "olmo3",
    "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next", "seed_oss", "step3p7",
)  # fmt: skip
"""Families that ``make test-families`` takes through every stage: newest types of the labs that published in 2025 and 2026.

DeepSeek V4 is not among them. Under ZeRO-3 transformers (5.23) renames the last norm of a base that it saved itself.
"""


def takes_long(node: str) -> bool:
    """Return whether CI leaves out the test with the pytest id ``node``, which is none of ``make test``."""
    file, _, name = node.removeprefix("tests/").partition("::")
    return bool(file in LONG and re.search(LONG[file], name))


def belongs_to_make_test(node: str) -> bool:
    """Return whether the test with the pytest id ``node`` runs in ``make test``."""
    file, _, name = node.removeprefix("tests/").partition("::")
    if file.startswith("unit/"):
        return not (file in SLOW_UNIT and re.search(SLOW_UNIT[file], name))
    return bool(file in QUICK and re.search(QUICK[file], name))


GROUPS = {
    "cluster/": "cluster",
    "workflow/test_recipes": "recipes",
    **{
        f"workflow/test_{name}": "forked"
        for name in (
            "added_tokens", "loop", "own_files", "rates", "reshard", "saving", "script_adapters",
            "script_guard", "tensor_parallel_parts", "trackers",
        )
    },
    **{
        f"workflow/test_{name}.py": "shared checkout"
        for name in ("nvme", "script", "strategies", "submission_limit")
    },
    **{f"workflow/test_{name}.py": name for name in ("local", "reruns", "families")},
    "workflow/test_consolidate": "consolidate",
}  # fmt: skip
"""Groups of tests that share an expensive fixture or take minutes, by the beginning of their files: the longest first."""

FAULTS = re.compile(r"(cluster/test_faults\.py)::\w+\[(\w+)")
"""Tests of one strategy share its undisturbed training."""


def group_of(node: str) -> str:
    """Return the group of the test with the pytest id ``node``: tests of a group run in one process."""
    node = node.removeprefix("tests/")
    if faults := FAULTS.match(node):
        return " ".join(faults.groups())
    file = node.partition("::")[0]
    return next((group for start, group in GROUPS.items() if file.startswith(start)), file)
