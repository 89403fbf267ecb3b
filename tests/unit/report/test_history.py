import pytest

from shardmake.report.history import Interruption, read_history
from shardmake.run.attempt import AttemptDir
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from tests.finished_run import write_history


def test_attempts_are_stitched_by_step(rundir: RunDir) -> None:
    history = read_history(rundir)
    assert history.series("loss")[0] == list(range(1, 61)) and [span.world_size for span in history.spans] == [2, 2]
    assert history.hours == pytest.approx(0.5) and history.device_hours == pytest.approx(1.0)
    # Lost time runs from the last step that stayed to the first new one.
    assert history.interruptions == [Interruption(after_step=30, seconds=1260 - (60 + 29 * 20), why="interrupted")]


def test_an_attempt_without_a_step_costs_device_hours_all_the_same(rundir: RunDir) -> None:
    write_history(rundir, [(0, 360, range(0), "out of memory"), (360, 720, range(1, 10), "finished")])
    history = read_history(rundir)
    assert history.device_hours == pytest.approx(0.4)
    assert history.interruptions == [Interruption(0, 360, "out of memory")]
    assert [span.steps for span in history.spans] == ["none", "1 to 9"]


def test_attempts_whose_steps_are_all_repeated_cost_the_time_until_the_next_start(rundir: RunDir) -> None:
    lost = [(0, 18000, range(1, 31), "node failure"), (18100, 18900, range(1, 2), "preempted")]
    write_history(rundir, [*lost, (19000, 22000, range(1, 61), "finished")])
    history = read_history(rundir)
    assert [span.steps for span in history.spans] == ["none", "none", "1 to 60"]
    assert history.interruptions == [Interruption(0, 19000, "node failure, then preempted")]


def test_an_attempt_between_whose_steps_are_all_repeated_is_named(rundir: RunDir) -> None:
    first, last = (0, 900, range(1, 31), "interrupted"), (2000, 3000, range(31, 61), "finished")
    write_history(rundir, [first, (1000, 1900, range(31, 41), "node failure"), last])
    history = read_history(rundir)
    assert [span.steps for span in history.spans] == ["1 to 30", "none", "31 to 60"]
    assert history.interruptions == [Interruption(30, 2060 - (60 + 29 * 20), "interrupted, then node failure")]


def test_an_attempt_that_left_a_checkpoint_and_no_line_has_steps_that_are_not_logged(rundir: RunDir) -> None:
    lines = [line for line in read_metrics(rundir.metrics) if line.attempt == 2]
    rundir.metrics.write_text("".join(line.as_text() for line in lines))
    history = read_history(rundir)
    assert [span.steps for span in history.spans] == ["not logged", "31 to 60"]
    assert history.interruptions == [], "its steps may count"


def test_an_attempt_without_exit_records_lasts_as_long_as_its_steps(rundir: RunDir) -> None:
    for record in rundir.attempts.glob("*/node-*.json"):
        record.unlink()
    spans = read_history(rundir).spans
    assert (spans[0].started, spans[0].ended) == (60, 640)


def test_steps_that_a_script_logs_again_after_it_resumed_count_once(rundir: RunDir) -> None:
    lines = [(1, 1, 3.0), (2, 1, 2.5), (3, 1, 2.0), (2, 2, 2.4), (3, 2, 2.1)]
    rundir.metrics.write_text("".join(f'{{"step": {s}, "attempt": {a}, "loss": {x}}}\n' for s, a, x in lines))
    history = read_history(rundir)
    assert history.series("loss") == ([1, 2, 3], [3.0, 2.4, 2.1])
    assert history.interruptions == [], "without times their cost is not known"


def test_lines_that_name_no_attempt_belong_to_the_last(rundir: RunDir) -> None:
    rundir.metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "eval_loss": 1.5}\n')
    history = read_history(rundir)
    assert [span.steps for span in history.spans] == ["not logged", "1 to 1"]
    assert history.spans[1].lines == history.lines and history.series("eval_loss") == ([1], [1.5])


def test_device_hours_count_the_nodes_of_a_service(rundir: RunDir) -> None:
    write_history(rundir, [(0, 3600, range(1, 3), "finished")])
    folder = AttemptDir(rundir.attempts / "001")
    attempt, before = folder.read(), read_history(rundir)
    assert before.device_hours == attempt.world_size
    attempt.model_copy(update={"service_nodes": 2}).write(folder.settings)
    more = 2 * attempt.processes_per_node
    assert read_history(rundir).device_hours == attempt.world_size + more
    attempt.model_copy(update={"service_nodes": 2, "on_one_machine": True}).write(folder.settings)
    assert read_history(rundir).device_hours == attempt.world_size, "a service beside the ranks takes no node"
