"""Read and merge configurations: YAML, JSON, several files, and texts that the libraries' readers accept in part."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardmake.config.load import get_run, load_cluster, load_config, merge, read_yaml
from shardmake.config.models import Config
from shardmake.config.parse_text import parse_json, parse_yaml
from shardmake.config.slurm_options import JobKind
from shardmake.core.errors import ShardmakeError
from shardmake.launch.slurm_request import SlurmRequest
from tests.unit.config.samples import CLUSTER, RUN, make_run, merged, write

REPOSITORY = Path(__file__).parents[3]
TEXT_OR_NUMBER = "YAML reads this as a number. Put it in quotes."
TEXT_OR_TRUTH = "YAML reads on, off, yes and no as true or false. Put the word in quotes."


@pytest.mark.parametrize(("line", "expected"), [
    ("slurm: {time_limit: 90}", "slurm.time_limit: '90' is not a time limit. Write [D-]HH:MM:SS in quotes, such as '24:00:00'."),
    ("slurm: {partition: on}", f"slurm.partition: True is not allowed. Allowed: text. {TEXT_OR_TRUTH}"),
    ("slurm: {account: 1234}", f"slurm.account: 1234 is not allowed. Allowed: text. {TEXT_OR_NUMBER}"),
    ("slurm: {setup: [yes]}", f"slurm.setup.0: True is not allowed. Allowed: text. {TEXT_OR_TRUTH}"),
    ("slurm: {extra: {on: 1}}", "slurm.extra.1: YAML reads this name as a number, as null, or as true or false. Put it in quotes."),
    ("slurm: {~: 1}", "slurm.None: YAML reads this name as a number, as null, or as true or false. Put it in quotes."),
    ("max_nodes: 4.0", "max_nodes: 4.0 is not allowed. Allowed: a whole number from 1 to 100,000."),
    ("internet_on_compute_nodes: 'yes'", "internet_on_compute_nodes: 'yes' is not allowed. Allowed: true, false."),
    ("inter_node_gbps: .inf", "inter_node_gbps: inf is not allowed. Allowed: a number > 0 and <= 100,000."),
])  # fmt: skip
def test_values_that_yaml_converts_are_explained(line: str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path / "cluster.yaml", yaml.safe_dump(CLUSTER) + line + "\n")
    with pytest.raises(ShardmakeError) as error:
        load_cluster(path)
    assert str(error.value) == f"{path} cannot be used:\n  {expected}"


@pytest.mark.parametrize(("text", "value"), [
    ("24:00:00", "24:00:00"), ("0027", "0027"), ("0x1F", "0x1F"), ("0b11", "0b11"),
    ("1_000", 1000), ("-3", -3), ("+5", 5), ("0", 0), ("'8'", "8"),
])  # fmt: skip
def test_only_decimal_digits_are_a_number(text: str, value: int | str) -> None:
    """YAML 1.1 reads a time and a mask of permissions as numbers, whose text then differs from the file's."""
    assert parse_yaml(f"a: {text}") == {"a": value}


@pytest.mark.parametrize("spelling", ["5e-4", "5E-4", "0.5e-3", "+5e-4", ".5e-3", "5.e-4", "5.0e-4", "0.0005"])
def test_numbers_may_have_an_exponent(spelling: str, tmp_path: Path) -> None:
    text = yaml.safe_dump({"cluster": "c", "runs": {"chat": merged(RUN, {"learning_rate": ...})}})
    path = write(tmp_path / "c.yaml", text + f"    learning_rate: {spelling}\n")
    assert load_config(path).runs["chat"].learning_rate == 5e-4


def test_yaml_spellings_of_true_and_false_and_json_with_tabs_are_accepted(tmp_path: Path) -> None:
    text = yaml.safe_dump({"cluster": "c", "runs": {"chat": RUN}})
    assert not load_config(write(tmp_path / "c.yaml", text + "    packing: no\n")).runs["chat"].packing
    assert read_yaml(write(tmp_path / "c.json", '{\n\t"cluster":\t"a"\n}\n')) == {"cluster": "a"}


DIGITS = "value has 5001 digits; use sys.set_int_max_str_digits() to increase the limit."
WRONG: dict[str, tuple[int, str]] = {
    "runs:\n  a: 1\n  b: 2\n  a: 3\n": (4, "the key 'a' occurs twice."),
    "cluster: a\n\truns: b\n": (2, "found character '\\t' that cannot start any token."),
    "cluster: [a\nruns: b\n": (2, "expected ',' or ']', but got ':'."),
    "run: 1\nday: 2026-01-31\n": (2, "'2026-01-31' is a date. Write it in quotes."),
    "day: 2026-13-45\n": (1, "month must be in 1..12."),
    "rate: 0x_\n": (1, "invalid literal for int() with base 16: ''."),
    "steps: 1" + 5000 * "0" + "\n": (1, f"Exceeds the limit (4300 digits) for integer string conversion: {DIGITS}"),
    "a: 1\nruns: &all\n  more: *all\n": (2, "the section contains itself."),
    "runs: &all [*all]\n": (1, "the section contains itself."),
    "\n\nlogo: !!binary aGVsbG8=\n": (3, "values with the tag 'binary' have no meaning here."),
    "names: !!set {a, b}\n": (1, "values with the tag 'set' have no meaning here."),
    'name: "\\ud800"\n': (1, "the text has half of a pair of Unicode surrogates."),
}


@pytest.mark.parametrize(("text", "message"), [
    *((text.encode(), f", line {line} is not valid YAML: {problem}") for text, (line, problem) in WRONG.items()),
    (b"cluster: a\nruns: \xff\n", ", line 2 is not valid UTF-8. Save the file as UTF-8."),
    *((text, " has no keys. See config/README.md for the keys.") for text in (b"", b"- a\n")),
])  # fmt: skip
def test_invalid_yaml_is_rejected_with_its_line(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with pytest.raises(ShardmakeError) as error:
        read_yaml(path)
    assert str(error.value) == f"{path}{message}"


def test_a_missing_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    advice, missing = "Name a cluster file, such as config/clusters/local.yaml.", tmp_path / "d.yaml"
    for load, path, message in (
        (load_cluster, Path("c.yaml"), f"cluster: 'c.yaml' does not exist in {tmp_path}. {advice}"),
        (load_cluster, tmp_path, f"cluster: '{tmp_path}' is a folder. {advice}"),
        (load_config, missing, f"'{missing}' does not exist. Name an existing file, or write one: shardmake init"),
    ):
        with pytest.raises(ShardmakeError, match=f"^{re.escape(message)}$"):
            load(path)


def test_later_files_override_earlier_ones(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", {"cluster": "c", "runs": {"chat": RUN}})
    second = write(tmp_path / "b.yaml", {"runs": {"chat": {"data": {"eval": "x"}, "seed": 7}, "more": RUN}})
    config = load_config(first, second)
    assert list(config.runs) == ["chat", "more"]
    assert config.runs["chat"] == make_run(seed=7, data={"train": "org/data", "eval": "x"})


trees = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=4),
    max_leaves=10,
)
mappings = st.dictionaries(st.sampled_from("abcd"), trees, max_size=4)


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every path to a value that is not a mapping."""
    if not isinstance(value, dict):
        return {path: value}
    return {place: leaf for key, inner in value.items() for place, leaf in leaves(inner, (*path, key)).items()}


@given(base=mappings, update=mappings)
def test_merging_takes_every_leaf_of_the_update_and_keeps_the_others(base: Any, update: Any) -> None:
    result: dict[str, Any] = {}
    merge(result, base)
    merge(result, update)
    new, old, got = leaves(update), leaves(base), leaves(result)
    assert {place: got[place] for place in new} == new
    hidden = {place for place in old for other in new if place[: len(other)] == other or other[: len(place)] == place}
    assert got == {place: leaf for place, leaf in old.items() if place not in hidden} | new


def test_an_unknown_run_is_rejected() -> None:
    config = Config.model_validate({"cluster": "c", "runs": {"docs-chat": RUN, "other": RUN}})
    assert get_run(config, "other") == make_run()
    expected = r"^Run 'doc-chat' does not exist\. Did you mean 'docs-chat'\? The runs are: docs-chat, other\.$"
    with pytest.raises(ShardmakeError, match=expected):
        get_run(config, "doc-chat")


RECIPES = sorted((REPOSITORY / "examples/recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_loads(file: Path) -> None:
    config = load_config(file)
    assert [*config.runs] == [file.stem] and load_cluster(REPOSITORY / config.cluster).executor == "slurm"


SITES = sorted((REPOSITORY / "config/clusters/sites").glob("*.yaml"))


@pytest.mark.parametrize("file", SITES, ids=lambda file: file.stem)
def test_a_file_of_a_site_loads_and_says_that_it_did_not_run(file: Path) -> None:
    cluster = load_cluster(file)
    assert cluster.executor == "slurm" and "nor run there" in file.read_text()
    assert f"| `{file.name}` |" in (REPOSITORY / "docs/reference/sites.md").read_text() and len(SITES) == 10
    jobs = [SlurmRequest(cluster, kind, 60, cpus=4, memory_mib=4096, gpus=1) for kind in JobKind]
    assert all("--mem" not in " ".join(job.sbatch()) for job in jobs) == (cluster.slurm.memory == "none")


def test_aliases_quoted_dates_and_whole_pairs_are_read() -> None:
    text = "base: &base {model: m, data: &data {train: t}}\nrun: {<<: *base, data: *data, model: n, seed: 1}\n"
    assert parse_yaml(text)["run"] == {"model": "n", "data": {"train": "t"}, "seed": 1}
    assert parse_yaml("day: '2026-01-31'\nname: \"\U0001f600\"\n") == {"day": "2026-01-31", "name": "\U0001f600"}
    assert parse_json('["\\ud83d\\ude00", "\\\\ud800"]') == ["\U0001f600", "\\ud800"]


def test_texts_of_endless_depth_are_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        parse_yaml("[" * 3000)
    with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
        parse_json("[" * 200_000)


HALVES = '"\\ud800"', '["\\udc00"]', '{"a\\ud800": 1}', '["\\ud83d\\ude00", "\\ud83d!"]'
WRONG_JSON = {5000 * "9": "the number has too many digits"} | dict.fromkeys(
    HALVES, "the text has half of a pair of Unicode surrogates"
)


def test_a_number_of_too_many_digits_and_half_of_a_surrogate_pair_in_json_are_errors_of_their_line() -> None:
    for value, message in WRONG_JSON.items():
        with pytest.raises(json.JSONDecodeError) as error:
            parse_json('{\n"name": ' + value + "}")
        assert (error.value.lineno, error.value.msg) == (2, message)


def test_a_byte_order_mark_is_an_error_of_json_alone() -> None:
    assert parse_yaml("\ufeffseed: 1\n") == {"seed": 1}
    with pytest.raises(json.JSONDecodeError, match=r"byte order mark \(BOM\).* Save the file as UTF-8 without BOM"):
        parse_json('\ufeff{"seed": 1}')
