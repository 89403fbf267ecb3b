"""The prompts of the evaluation go through the chat template at plan."""

from pathlib import Path

import pytest

from shardmake.core.errors import ConfigError
from shardmake.evaluate.stage import check_prompts
from tests.finished_run import make_run
from tests.unit.data.test_encode import MARKED, make_tokenizer

STRICT = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}"


def test_prompts_that_the_template_rejects_are_refused(tmp_path: Path) -> None:
    run = make_run(model=str(tmp_path), evaluation={"prompts": ["Who are you?"]})
    make_tokenizer(MARKED).save_pretrained(tmp_path)
    check_prompts(run)
    make_tokenizer(STRICT).save_pretrained(tmp_path)
    check_prompts(make_run(model=str(tmp_path)))
    with pytest.raises(
        ConfigError, match=r"evaluation\.prompts: .* rejects 'Who are you\?': a system message is needed"
    ):
        check_prompts(run)
