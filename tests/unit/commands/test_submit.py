"""The arguments of `shardmake submit`, and what is refused before anything is queued."""

from typing import Any

import pytest

from shardmake.commands.submit import _check, _options
from shardmake.config.invocation import config_options
from shardmake.config.load import parse_config
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import RUN
from tests.unit.plans import make_cluster


def test_the_job_gets_the_arguments_without_the_configuration() -> None:
    words = [
        "train", "--profile", "slurm", "--configfile", "a.yaml", "b.yaml", "--config", "x=1", "runs={}",
        "--rerun-triggers", "mtime", "-k",
    ]  # fmt: skip
    assert config_options(words)[1] == ["train", "--profile", "slurm", "--rerun-triggers", "mtime", "-k"]


@pytest.mark.parametrize("words", ["-F", "-f", "-R train_run", "--unlock", "--touch", "-d elsewhere"])
def test_what_a_later_job_must_not_repeat_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used with submit: a driver job that continues"):
        _options(["--profile", "slurm", *words.split()])


@pytest.mark.parametrize(("to", "targets", "cluster", "refused"), [
    ("hub:lab/chat", [], {}, True),
    (["file:out", "s3://bucket/chat"], ["push"], {}, True), ("hub:lab/chat", ["evaluate"], {}, False),
    ("file:out", [], {}, False),
    ("hub:lab/chat", [], {"internet_on_compute_nodes": True}, False),
])  # fmt: skip
def test_a_push_that_the_job_cannot_do_is_refused(
    to: Any, targets: list[str], cluster: dict[str, Any], refused: bool
) -> None:
    config = parse_config({"cluster": "c.yaml", "runs": {"chat": RUN | {"push": {"to": to}}}}, "test")
    found = make_cluster(executor="slurm", **cluster)
    if not refused:
        _check(config, found, targets)
        return
    with pytest.raises(ConfigError, match=r"^The driver job cannot push chat to .*Run `shardmake submit evaluate`"):
        _check(config, found, targets)


def test_a_machine_without_slurm_has_nothing_to_submit_to() -> None:
    config = parse_config({"cluster": "c.yaml", "runs": {"chat": RUN}}, "test")
    with pytest.raises(ConfigError, match=r"^There is nothing to submit to: c\.yaml has `executor: local`"):
        _check(config, make_cluster(), [])
