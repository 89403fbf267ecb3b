"""A chat template of the run's own: refused if it cannot be read, counted by content, used everywhere."""

from pathlib import Path

import pytest

from shardmake.config.chat_template import read_template
from shardmake.config.effects import TEMPLATE, differences, effect_of, values_of
from shardmake.config.inputs import check_inputs, local_files
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import make_run
from tests.unit.plans import make_cluster

MARKED = (
    "{%- for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}{{ message.role }}: "
    "{%- generation -%}{{ message.content }}{%- endgeneration -%}{% endfor %}"
)


@pytest.mark.parametrize(("content", "says"), [
    (b"", "is empty. Write"), (b" \n", "is empty. Write"), (b"\xff\xfe", "cannot read"),
    (b"one\n{% for m in messages %}", "line 2, is not valid Jinja: Unexpected end of template"),
    (b"{{ messages[0] ", "line 1, is not valid Jinja"),
    (None, "runs.chat.data.chat_template: 'chat.jinja' is not a file"),
])  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("chat.jinja").write_bytes(content)
    run = make_run(data={"train": "org/data", "chat_template": "chat.jinja"})
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*chat\.jinja") as caught:
        check_inputs("chat", run)
    assert says in str(caught.value)


def test_a_template_with_the_tags_of_transformers_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(MARKED)
    assert read_template(tmp_path / "chat.jinja") == MARKED


def test_an_edit_of_the_template_counts_for_data_and_training_and_a_new_name_does_not(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jinja", tmp_path / "b.jinja"
    first.write_text(MARKED)
    second.write_text(MARKED)
    runs = [make_run(data={"train": "org/data", "chat_template": str(path)}) for path in (first, second)]
    assert local_files(runs[0], "data") == [str(first)]
    one, other = (values_of(run, make_cluster()) for run in runs)
    assert [line.partition(":")[0] for line in differences(one, other)] == ["data.chat_template"]
    assert effect_of("data.chat_template").changes == ()
    second.write_text(MARKED + "\n")
    assert TEMPLATE in [line.partition(":")[0] for line in differences(one, values_of(runs[1], make_cluster()))]
    assert effect_of(TEMPLATE).changes == ("data", "plan", "render", "train")
