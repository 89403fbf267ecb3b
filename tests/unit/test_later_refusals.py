"""Every refusal of a stage after the plan has a reason why the plan could not state it.

The test reads the source tree. A new ``raise`` in a later stage needs a row here; before you add one, check whether
the plan can run the same check. A row is a function, or a module whose refusals all have the same reason. Its reason is
a `Why`, or the function that refuses the same at plan; a command that is run alone then still needs its own check.
"""

import ast
import builtins
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import shardmake

SOURCES = Path(shardmake.__file__).parent
LATER = ("data", "train", "consolidate", "evaluate", "push", "checkpoint", "launch", "report")


class Why(Enum):
    """Reasons why a later stage refuses something."""

    ALL_ROWS = "the plan encodes the first rows only, and later rows may differ"
    WEIGHTS = "it needs the values of the weights, which are fetched after the plan"
    RANKS = "it needs the ranks and their engine, or a GPU"
    NODE = "it needs the compute node: its network, memory or devices"
    RESULT = "it needs what training wrote"
    NETWORK = "it needs an answer of the hub, an object store or Slurm"
    CHANGED = "it can change after the plan: free space, permissions, other processes, edited files"
    COMMAND = "it concerns the arguments of a command that a user runs by hand"


A, R, C, N = Why.ALL_ROWS, Why.RESULT, Why.CHANGED, Why.NETWORK
TABLE: dict[str, Why | str] = {
    "checkpoint/formats/contents.py": R,
    "checkpoint/formats/dcp.py": R,
    "checkpoint/formats/dtypes.py:check_target": "config/models.py:Run",
    "checkpoint/formats/fsdp_per_rank.py": R,
    "checkpoint/formats/hub_layout.py:_made": "plan/inspect_model.py:_unmergeable",
    "checkpoint/formats/hub_layout.py:check_all_loaded": Why.WEIGHTS,
    "checkpoint/formats/hub_layout.py:in_class_layout": Why.WEIGHTS,
    "checkpoint/formats/hub_layout.py:hub_weights": "plan/inspect_model.py:_files_layout",
    "checkpoint/formats/huggingface.py": R,
    "checkpoint/formats/lora.py": R,
    "checkpoint/formats/lora.py:adapter_only": Why.COMMAND,
    "checkpoint/formats/lora.py:merge": Why.COMMAND,
    "checkpoint/formats/lora.py:read_settings": "plan/inspect_model.py:_unmergeable",
    "checkpoint/formats/lora.py:split": "plan/inspect_model.py:_unmergeable",
    "checkpoint/formats/models.py": R,
    "checkpoint/formats/nvme_swap.py": R,
    "checkpoint/formats/pickle_machine.py": R,
    "checkpoint/formats/pickle_names.py": R,
    "checkpoint/formats/registry.py": R,
    "checkpoint/formats/single_file.py": R,
    "checkpoint/formats/torch_zip_reader.py": R,
    "checkpoint/formats/unpickle.py": R,
    "checkpoint/formats/zero.py": R,
    "checkpoint/formats/zero_files.py": R,
    "checkpoint/formats/zero_tensors.py": R,
    "checkpoint/record.py": C,
    "checkpoint/store.py:commit_and_prune": Why.RANKS,
    "checkpoint/reshard/convert.py": R,
    "checkpoint/reshard/states.py": R,
    "consolidate/aux_files.py": C,
    "consolidate/destination.py": Why.COMMAND,
    "consolidate/loading.py:find_class": "plan/abilities.py:check_class",
    "consolidate/loading.py:check_loading": R,
    "consolidate/loading.py:refuse_impossible_config": C,
    "consolidate/merge.py": Why.COMMAND,
    "consolidate/merge_plan.py:MergePlan.check": R,
    "consolidate/merge_plan.py:_refuse_misfits": R,
    "consolidate/merge_plan.py:resolve_ties": R,
    "consolidate/peft_check.py": R,
    "consolidate/merge_plan.py:plan_merge": Why.COMMAND,
    "consolidate/recorded.py": R,
    "consolidate/scan.py": R,
    "consolidate/source_checks.py": R,
    "consolidate/source_checks.py:parse_allowed": Why.COMMAND,
    "consolidate/stage.py:_convert": R,
    "consolidate/stage.py:final_checkpoint": R,
    "consolidate/stage.py:consolidate_run": C,
    "consolidate/staging.py": C,
    "consolidate/stream.py": R,
    "consolidate/verify.py": R,
    "consolidate/writer.py": R,
    "data/dataset.py:check_isolation": "plan/refusals.py:wrong_packing",
    "data/varlen.py": "plan/inspect_model.py:_try_varlen",
    "data/chat.py": "data/check.py:check_first_rows",
    "data/encode.py": A,
    "data/files.py": A,
    "data/layout.py": A,
    "data/parquet.py": A,
    "data/sources.py": "data/check.py:check_sources",
    "data/check.py:check_sources": "cli.py:plan",
    "data/build.py:check_divisible": "data/check.py:check_first_rows",
    "data/outcomes.py": A,
    "data/examples.py:check_vocabulary": A,
    "data/examples.py:_load_config": "data/check.py:check_first_rows",
    "data/examples.py:_stop_ids": "data/check.py:check_first_rows",
    "data/examples.py:load_tokenizer": "data/check.py:check_first_rows",
    "data/raw.py:check_raw": C,
    "data/raw.py:files_of_raw": "data/check.py:check_sources",
    "evaluate/backends.py:check_backend": "cli.py:plan",
    "evaluate/harness.py": "cli.py:plan",
    "evaluate/preferences.py:score_rewards": R,
    "evaluate/scores.py:Score.means": R,
    "evaluate/scores.py:Scores.as_record": A,
    "evaluate/scores.py:smaller_after_out_of_memory": Why.RANKS,
    "evaluate/prompts.py:as_prompt": "evaluate/prompts.py:check_prompts",
    "evaluate/prompts.py:check_prompts": "cli.py:plan",
    "launch/attempt_end.py:apply_decision": R,
    "launch/driver.py": C,
    "launch/driver_script.py": N,
    "launch/driver_script.py:refuse_login_node": Why.COMMAND,
    "launch/driver_script.py:refuse_while_driven": Why.COMMAND,
    "launch/monitor.py": C,
    "launch/jobs.py:_process_id": C,
    "launch/input_validation.py": C,
    "launch/preflight.py": Why.NODE,
    "launch/rendezvous.py": Why.NODE,
    "launch/resume.py:read_settings": Why.NODE,
    "launch/resume_validation.py": Why.NODE,
    "launch/service.py": Why.NODE,
    "launch/slurm_jobs.py": N,
    "launch/slurm_request.py:_checked": "cli.py:plan",
    "launch/submission.py:check_stop_file": C,
    "launch/user_script.py:refuse_repetition": C,
    "launch/container.py:_probe": "cli.py:plan",
    "launch/container.py:check_container": "cli.py:plan",
    "launch/submission_check.py:_judge": "cli.py:plan",
    "push/bundle.py:_refuse_secrets": "push/check.py:check_push",
    "push/bundle.py:_verified_model": R,
    "push/check.py": "cli.py:plan",
    "push/folder.py:_check_space": C,
    "push/folder.py:_copy": C,
    "push/folder.py:push_to_folder": C,
    "push/folder.py:refuse_foreign": "push/check.py:check_destinations",
    "push/hub.py:_explain_xet": N,
    "push/hub.py:_refuse_public": N,
    "push/hub.py:_read_back": N,
    "push/hub.py:_refuse_foreign": N,
    "push/hub.py:connect": "push/check.py:check_destinations",
    "push/object_store.py": N,
    "push/stage.py:push": Why.COMMAND,
    "train/callbacks/non_finite.py:NonFiniteCheck.on_step_end": Why.RANKS,
    "train/checkpoint_saver.py": C,
    "train/engine_check.py:refuse_differences": Why.RANKS,
    "train/load_model.py:check_names": R,
    "train/network_check.py": Why.NODE,
    "train/reference.py:read_log_probs": R,
    "train/script_guard.py": Why.RANKS,
    "train/sequence_parallel.py:check_parts": "plan/refusals.py:wrong_sequence_parallel",
    "train/trackers.py:check_trackers": "cli.py:plan",
}


def refusals() -> set[str]:
    """Return ``module:function`` of every raise of an error that is not one of Python's own."""
    files = sorted(path for package in LATER for path in (SOURCES / package).rglob("*.py"))
    return {
        f"{path.relative_to(SOURCES)}:{name}" for path in files for name in _raising(ast.parse(path.read_text()), "")
    }


def _raising(node: ast.AST, inside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _raising(child, f"{inside}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.Raise) and child.exc is not None and not _is_builtin(child.exc):
            yield inside
        yield from _raising(child, inside)


def _is_builtin(error: ast.expr) -> bool:
    called = error.func if isinstance(error, ast.Call) else error
    return isinstance(called, ast.Name) and hasattr(builtins, called.id)


def test_every_later_refusal_has_a_reason() -> None:
    missing = sorted(name for name in refusals() if name not in TABLE and name.partition(":")[0] not in TABLE)
    assert not missing, f"check these at plan, or add a row that says why that is impossible: {missing}"


def test_every_row_is_of_a_refusal() -> None:
    found = refusals()
    modules = {name.partition(":")[0] for name in found}
    assert sorted(row for row in TABLE if row not in (found if ":" in row else modules)) == []


def test_every_earlier_check_exists() -> None:
    for row, why in TABLE.items():
        if isinstance(why, str):
            module, _, name = why.partition(":")
            tree = ast.parse((SOURCES / module).read_text())
            assert name in {getattr(node, "name", "") for node in ast.walk(tree)}, (row, why)


class Sources:
    """The definitions and imports of each module of the source tree, to follow calls by name."""

    def __init__(self) -> None:
        self.trees = {str(path.relative_to(SOURCES)): ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}
        self.imports = {module: dict(self._imports(tree)) for module, tree in self.trees.items()}
        self.definitions = {module: dict(self._definitions(tree)) for module, tree in self.trees.items()}

    def _definitions(self, tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name, node
        for node in tree.body:  # constants
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if isinstance(target, ast.Name):
                    yield target.id, node

    def _imports(self, tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardmake"):
                for alias in node.names:
                    yield alias.asname or alias.name, (str(node.module), alias.name)

    def resolve(self, package: str, name: str) -> tuple[str, str]:
        """Return the module that defines ``name`` of ``package``, which may be a module or import it from one."""
        folder = "/".join(package.split(".")[1:])
        module = next((file for file in (f"{folder}.py", f"{folder}/__init__.py") if file in self.trees), "__init__.py")
        if name not in self.definitions[module] and name in self.imports[module]:
            return self.resolve(*self.imports[module][name])
        return module, name

    def used_by(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        """Yield what a function uses. A method counts in its own module and in those that the module imports from."""
        names = self.imports[module]
        for node in ast.walk(self.definitions.get(module, {}).get(name, ast.Pass())):
            if isinstance(node, ast.Name):
                yield self.resolve(*names[node.id]) if node.id in names else (module, node.id)
            elif isinstance(node, ast.Attribute):
                yield module, node.attr
                if isinstance(node.value, ast.Name) and node.value.id in names:
                    yield self.resolve(".".join(names[node.value.id]), node.attr)
                yield from (self.resolve(package, node.attr) for package, _ in names.values())
            elif isinstance(node, ast.Constant) and str(node.value).startswith("shardmake."):  # run as a process
                child, _ = self.resolve(str(node.value), "")
                yield from ((child, defined) for defined in self.definitions[child])

    def reached_by_plan(self) -> set[tuple[str, str]]:
        """Return every module and name that `shardmake plan` uses, directly or in what it calls."""
        reached, new = set[tuple[str, str]](), {("cli.py", "plan")}
        while new:
            reached |= new
            new = {used for one in new for used in self.used_by(*one)} - reached
        return reached


def test_plan_makes_every_earlier_check() -> None:
    sources = Sources()
    reached = sources.reached_by_plan()
    for row, why in TABLE.items():
        if isinstance(why, str):
            module, _, name = (row if why == "cli.py:plan" else why).partition(":")
            checks = [name] if name else sources.definitions[module]
            assert reached & {(module, check) for check in checks}, f"`shardmake plan` does not call {module}:{name}"


def test_the_configuration_and_the_plan_are_not_later() -> None:
    """They come first, so their refusals need no row."""
    assert not any(row.startswith(("config/", "plan/", "fetch/")) for row in TABLE)
