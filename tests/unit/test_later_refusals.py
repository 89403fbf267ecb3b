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


ROWS: dict[Why | str, str] = {
    Why.ALL_ROWS: """
        data/encode.py data/files.py data/json_text.py data/layout.py data/packing.py
        evaluate/scores.py:as_record
    """,
    Why.WEIGHTS: """
        checkpoint/formats/hub_layout.py:in_class_layout
        train/load_model.py:load_model
    """,
    Why.RANKS: """
        checkpoint/store.py:commit_and_prune evaluate/scores.py:smaller_after_out_of_memory
        train/callbacks/non_finite.py:NonFiniteCheck.on_step_end train/engine_check.py:refuse_differences
        train/load_model.py:match_rank_0 train/script_guard.py
    """,
    Why.NODE: """
        launch/preflight.py launch/rendezvous.py launch/resume.py:read_settings launch/resume_validation.py
        launch/service.py train/network_check.py
    """,
    Why.RESULT: """
        checkpoint/formats/contents.py checkpoint/formats/dcp.py checkpoint/formats/huggingface.py
        checkpoint/formats/lora.py checkpoint/formats/models.py checkpoint/formats/pickle_machine.py
        checkpoint/formats/pickle_names.py checkpoint/formats/registry.py
        checkpoint/formats/torch_zip_reader.py checkpoint/formats/unpickle.py
        checkpoint/formats/zero.py checkpoint/formats/zero_files.py checkpoint/reshard/convert.py
        checkpoint/reshard/states.py
        consolidate/loading.py:check_loading consolidate/merge_plan.py:MergePlan.check
        consolidate/merge_plan.py:_refuse_misfits consolidate/merge_plan.py:_with_rows
        consolidate/merge_plan.py:resolve_ties
        consolidate/peft_check.py consolidate/scan.py consolidate/source_checks.py
        consolidate/stage.py:_convert consolidate/stage.py:final_checkpoint consolidate/stream.py
        consolidate/verify.py consolidate/writer.py evaluate/preferences.py:score_rewards
        evaluate/scores.py:means launch/attempt_end.py:apply_decision push/bundle.py:_verified_model
        train/load_model.py:check_names train/preferences.py:read_log_probs
    """,
    Why.NETWORK: """
        launch/driver_script.py launch/slurm_jobs.py push/hub.py:_explain_xet push/hub.py:_read_back
        push/hub.py:_refuse_foreign push/hub.py:_refuse_public push/object_store.py
    """,
    Why.CHANGED: """
        checkpoint/record.py consolidate/aux_files.py consolidate/destination.py:StagingLock._locked
        consolidate/destination.py:discard_on_error consolidate/loading.py:refuse_impossible_config
        consolidate/stage.py:consolidate_run launch/driver.py launch/jobs.py:_process_id
        launch/monitor.py launch/resume_validation.py:validate_inputs
        launch/submission.py:check_stop_file launch/user_script.py:refuse_repetition
        push/folder.py:_copy push/folder.py:push_to_folder train/checkpoint_saver.py
    """,
    Why.COMMAND: """
        checkpoint/formats/lora.py:adapter_only checkpoint/formats/lora.py:merge consolidate/destination.py
        consolidate/merge.py consolidate/merge_plan.py:plan_merge consolidate/source_checks.py:parse_allowed
        launch/driver_script.py:refuse_login_node launch/driver_script.py:refuse_while_driven push/stage.py:push
    """,
    "cli/stages.py:plan": """
        data/check.py:check_sources evaluate/backends.py:check_backend evaluate/harness.py
        evaluate/prompts.py:check_prompts launch/container.py:_probe launch/container.py:check_container
        launch/slurm_request.py:_checked launch/submission_check.py:_check_memory
        launch/submission_check.py:_check_step launch/submission_check.py:_judge
        push/check.py train/trackers.py:check_trackers
    """,
    "config/models.py:Run": "checkpoint/formats/dtypes.py:check_target",
    "data/check.py:check_first_rows": (
        "data/build.py:check_divisible data/chat.py data/examples.py:open_chat_template data/placeholders.py:seam"
    ),
    "data/check.py:check_sources": "data/examples.py:check_named data/sources.py",
    "evaluate/prompts.py:check_prompts": "evaluate/prompts.py:as_prompt",
    "plan/abilities.py:check_class": "consolidate/loading.py:find_class",
    "plan/inspect_model.py:_files_layout": "checkpoint/formats/hub_layout.py:hub_weights",
    "plan/inspect_model.py:_try_varlen": "data/varlen.py",
    "plan/inspect_model.py:_unmergeable": """
        checkpoint/formats/hub_layout.py:_made checkpoint/formats/lora.py:read_settings
        checkpoint/formats/lora.py:split
    """,
    "plan/refusals.py:wrong_packing": "data/dataset.py:check_isolation",
    "plan/parallelism.py:wrong_sequence_parallel": "train/sequence_parallel.py:check_parts",
    "push/check.py:check_destinations": "push/folder.py:refuse_foreign push/hub.py:connect",
    "push/check.py:check_push": "push/bundle.py:make_bundle",
}
TABLE = {row: why for why, rows in ROWS.items() for row in rows.split()}


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
        reached, new = set[tuple[str, str]](), {("cli/stages.py", "plan")}
        while new:
            reached |= new
            new = {used for one in new for used in self.used_by(*one)} - reached
        return reached


def test_plan_makes_every_earlier_check() -> None:
    sources = Sources()
    reached = sources.reached_by_plan()
    for row, why in TABLE.items():
        if isinstance(why, str):
            module, _, name = (row if why == "cli/stages.py:plan" else why).partition(":")
            checks = [name] if name else sources.definitions[module]
            assert reached & {(module, check) for check in checks}, f"`shardmake plan` does not call {module}:{name}"


def test_the_configuration_and_the_plan_are_not_later() -> None:
    """They come first, so their refusals need no row."""
    assert not any(row.startswith(("config/", "plan/", "fetch/")) for row in TABLE)
