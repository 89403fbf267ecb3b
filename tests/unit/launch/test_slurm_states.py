"""Slurm's words, as they really are printed."""

import pytest

from shardmake.launch.slurm_states import JobState, is_no_such_job, parse_rows, parse_scontrol, parse_word


@pytest.mark.parametrize(
    ("text", "state", "word"),
    [
        ("PENDING", JobState.PENDING, "PENDING"),
        ("RUNNING", JobState.RUNNING, "RUNNING"),
        ("COMPLETING", JobState.RUNNING, "COMPLETING"),
        ("COMPLETED", JobState.ENDED, "COMPLETED"),
        ("COMPLETED+", JobState.ENDED, "COMPLETED"),
        ("CANCELLED by 1000", JobState.ENDED, "CANCELLED"),
        ("CANCELLED+", JobState.ENDED, "CANCELLED"),
        ("OUT_OF_MEMORY", JobState.ENDED, "OUT_OF_MEMORY"),
        ("NODE_FAIL", JobState.ENDED, "NODE_FAIL"),
        ("REQUEUED", JobState.PENDING, "REQUEUED"),
        ("SPECIAL_EXIT", JobState.PENDING, "SPECIAL_EXIT"),
        ("UNKNOWN", JobState.UNKNOWN, "UNKNOWN"),
        ("SOMETHING_OF_SLURM_30", JobState.UNKNOWN, "SOMETHING_OF_SLURM_30"),
        ("", JobState.UNKNOWN, ""),
    ],
)
def test_every_word_has_its_meaning(text: str, state: JobState, word: str) -> None:
    assert parse_word(text) == (state, word)


def test_rows_of_squeue_and_sacct() -> None:
    text = "12|RUNNING|c[1-2]|a\n13|CANCELLED by 0|None assigned|b\n12.batch|RUNNING|c1|a\n14|COMPLETED+||c\n\nnoise\n"
    found = parse_rows(text)
    assert {job: status.state for job, status in found.items()} == {
        "12": JobState.RUNNING,
        "13": JobState.ENDED,
        "14": JobState.ENDED,
    }
    assert (found["12"].nodes, found["12"].name) == ("c[1-2]", "a")
    assert (found["13"].word, found["13"].by) == ("CANCELLED", "0")


def test_a_requeued_job_counts_by_its_last_row() -> None:
    assert parse_rows("7|NODE_FAIL|c1|a\n7|PENDING||a\n")["7"].state is JobState.PENDING


def test_scontrol() -> None:
    text = "JobId=12 JobName=x\n   JobState=NODE_FAIL Reason=None Dependency=(null)\n   NodeList=c[2-3]\n   JobName=y"
    status = parse_scontrol(text)
    assert (status.state, status.word, status.nodes, status.name) == (JobState.ENDED, "NODE_FAIL", "c[2-3]", "x")


@pytest.mark.parametrize("word", ["CANCELLED", "TIMEOUT"])
def test_a_preempted_job_may_go_by_another_word(word: str) -> None:
    text = "JobId=12 JobName=x JobState={} NodeList=c1 PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime={}"
    assert parse_scontrol(text.format(word, "2026-11-21T10:05:00")).word == "PREEMPTED"
    assert parse_scontrol(text.format(word, "None")).word == word


def test_silence_is_not_an_end() -> None:
    assert is_no_such_job("slurm_load_jobs error: Invalid job id specified")
    assert not is_no_such_job("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
