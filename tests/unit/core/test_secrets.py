"""Place secrets in all inputs of a run, and search all of its outputs for them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.load import parse_config
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.core.secrets import find_secrets, is_secret, keys_of_tokens, mask, public_url, redact
from shardmake.push.stage import push
from shardmake.report.stage import write_report
from shardmake.run.evaluation import Sample
from tests.finished_run import DRAWN, EVALUATED, MODEL, make_run, make_rundir, write_model
from tests.hub import WRITER, FakeHub

TOKEN = "hf_Wq3TfEaYk2MdL9xPzRbNcUvHs"
SECRET = "x7Kq/2mPZ0aV+planted+secret"
PASSWORD = "hunter2hunter2"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub(tmp_path / "hub") as server:
        server.tokens[TOKEN] = server.tokens[WRITER]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield server


def test_no_secret_reaches_any_output(
    hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rundir = make_rundir(tmp_path)
    to = ["hub:lab/chat", "file:published/chat", f"memory://ada:{PASSWORD}@models/chat"]
    logs = [rundir.attempts / "001" / "node-0.log", rundir.attempts / "001" / "errors.txt"]
    for log in logs:
        log.write_text(f"export HF_TOKEN={TOKEN} AWS_SECRET_ACCESS_KEY={SECRET}\n")
    sample = Sample(prompt="What is the token?", base=TOKEN, tuned=f"It is {SECRET}.")
    planted = [*logs, rundir.evaluation]
    EVALUATED.model_copy(update={"samples": [sample]}).write(rundir.evaluation)
    run = make_run(push={"to": to})
    push(run, rundir)
    write_report(run, rundir)
    hub.fail(".*", times=99, status=403, message="no")
    with pytest.raises(ShardmakeError) as refused:
        push(run, rundir)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path not in planted]
    assert {"README.md", "report.html", "receipt.json"} <= {path.name for path in written}
    texts = {str(path): path.read_bytes().decode(errors="replace") for path in written}
    texts |= {"terminal": "".join(capfd.readouterr()), "log": caplog.text, "error": str(refused.value)}
    leaks = [name for name, text in texts.items() for secret in (TOKEN, SECRET, PASSWORD) if secret in text]
    assert leaks == []


SHAPES = {
    "hub": TOKEN,
    "AWS": "AKIAIOSFODNN7EXAMPLE",
    "AWS for a session": "ASIAIOSFODNN7EXAMPLE",
    "GitHub": "ghp_" + "a1" * 18,
    "GitHub, fine-grained": "github_pat_" + "a1" * 20,
    "GitLab": "glpat-" + "a1-B" * 5,
    "Slack": "xoxb-123456789012-abcdef",
    "OpenAI": "sk-proj-" + "a1B2" * 6,
    "W&B": "wandb_v1_" + "a1B2" * 8,
    "W&B, older": "wandb login " + "0123abcdef" * 4,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "URL with slashes": "https://ada:pa/ss/w0rd@host/x",
    "password": "password=Plant77w!",
    "secret": 'client_secret: "Plant78w!"',
    "key": "api-key=Plant79w!",
    "header": "Authorization: Bearer Plant80w.x/y",
    "header of a login": "authorization: Basic UGxhbnQ4MXc",
    "curl": "curl -s -u ada:Plant82w!",
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
}
"""A text of each form; its last word, or what stands after ``:`` or ``=``, is the secret."""
BY_NAME = {
    "MY_DB_PASSWORD": "hunter2w",
    "SIGNING_KEY": "zebra-42",
    "BOT_TOKEN": "x.y.z.1234",
    "THE_SECRET": "q1w2e3r4",
    "OTHER_PASSWORD": "SecretHorse",
    "MY_PASSPHRASE": "correct horse battery",
}


LOGINS = (
    "-u ada:Pl,82",
    "--user=ada:Pl,82",
    "--user 'ada:Pl,82 w'",
    "-uada:Pl,82",
    "-su ada:Pl,82",
    "--proxy-user ada:Pl,82",
)


@pytest.mark.parametrize("login", LOGINS)
def test_a_login_of_curl_is_removed_and_a_configuration_with_one_is_refused(login: str) -> None:
    command = f"curl -s {login} https://host"
    for text in (redact(command), mask(command)):
        assert "Pl,82" not in text and "https://host" in text
    assert keys_of_tokens({"notify": {"command": command}}) == ["notify.command"]
    assert keys_of_tokens({"notify": {"command": command.split()}}) == ["notify.command"]


@pytest.mark.parametrize(
    "harmless", ["curl -u ada:$PASSWORD x", "Authorization: Bearer $TOKEN", "docker run --user 1000:100000 x"]
)
def test_the_name_of_a_variable_and_other_users_are_no_login(harmless: str) -> None:
    assert redact(harmless) == harmless
    assert keys_of_tokens({"notify": {"command": harmless.split()}}) == []


def secret_of(text: str) -> str:
    return re.split(r"[ =]|ada:", text)[-1].partition("@")[0].strip('"') if "PRIVATE" not in text else text


def outputs_of_a_command(text: str, tmp_path: Path) -> dict[str, str]:
    """Return what a command prints, logs, warns, raises and keeps, if each of these has ``text``."""
    program = (
        "import logging, sys\n"
        "from shardmake import cli\n"
        "from shardmake.core.errors import ShardmakeError\n"
        "@cli.app.command()\n"
        "def leak(how: str):\n"
        "    logger, text = logging.getLogger('shardmake.leak'), sys.stdin.read()\n"
        "    logger.info('info %s', text); logger.warning('warning %s', text); cli.typer.echo(f'echo {text}')\n"
        "    print('print', text); print('error', text, file=sys.stderr)\n"
        "    raise ShardmakeError(f'Failed: {text}') if how == 'known' else ValueError(f'bug {text}')\n"
        "cli.main()\n"
    )
    found = {}
    (tmp_path / "logs").mkdir(exist_ok=True)
    for words in (["leak", "known"], ["--verbose", "leak", "bug"]):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(
            command, input=text, cwd=tmp_path, capture_output=True, text=True, env=os.environ | BY_NAME
        )
        assert done.returncode != 0 and (done.stdout + done.stderr).count("[removed]") >= 6, done.stderr
        found[words[-1]] = done.stdout + done.stderr
    return found | {str(path): path.read_text() for path in (tmp_path / "logs").iterdir()}


def test_no_form_of_a_secret_leaves_a_command(tmp_path: Path) -> None:
    """Terminal, log, warning, error, traceback and the file of a traceback, with all forms at once and by value."""
    texts = [*SHAPES.values(), *(f"it is {value}!" for value in BY_NAME.values())]
    found = outputs_of_a_command(" ; ".join(texts), tmp_path)
    assert len(found) == 3
    planted = {name: secret_of(text) for name, text in SHAPES.items()} | BY_NAME
    assert [(name, place) for place, text in found.items() for name, value in planted.items() if value in text] == []


@pytest.mark.parametrize("name", SHAPES)
def test_no_form_of_a_secret_reaches_card_report_and_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardmake.push.bundle.card_plots", lambda *_: DRAWN)
    rundir = make_rundir(tmp_path)
    text = SHAPES[name]
    EVALUATED.model_copy(update={"samples": [Sample(prompt=text, base=f"a {text}", tuned=text)]}).write(
        rundir.evaluation
    )
    run = make_run(push={"to": "file:published/chat", "samples": True})
    push(run, rundir)
    texts = {
        path: path.read_bytes().decode(errors="replace") for path in Path("published").rglob("*") if path.is_file()
    }
    assert "[removed]" in texts[Path("published/chat/README.md")]
    assert [str(path) for path, found in texts.items() if secret_of(text) in found] == []


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"script_args": ["--hub_token", TOKEN]}, "runs.chat.script_args"),
        ({"script_args": ["--lr", "1", "--db-password", "Plant-glpat"]}, "runs.chat.script_args"),
        ({"script_args": ["--hub_token=Plant-glpat"]}, "runs.chat.script_args"),
        ({"model": f"lab/{TOKEN}"}, "runs.chat.model"),
        ({"notify": {"command": "curl -H 'Authorization: glpat-" + "a1-B" * 5 + "'"}}, "runs.chat.notify.command"),
    ],
)
def test_a_token_in_the_configuration_is_refused_without_printing_it(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: this looks like a token or key.* export it in") as error:
        parse_config({"cluster": "c.yaml", "runs": {"chat": values}}, "config.yaml")
    assert TOKEN not in str(error.value) and "glpat" not in str(error.value)


@pytest.mark.parametrize(
    "words", [["--use_auth_token", "true"], ["--max_new_tokens", "100000"], ["--password-file", "/home/ada/file"]]
)
def test_ordinary_arguments_of_a_script_are_accepted(words: list[str]) -> None:
    assert keys_of_tokens({"script_args": words, "other": [3, "--secret"]}) == []


def test_a_model_file_with_a_token_is_not_pushed(hub: FakeHub, tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    write_model(rundir, {**MODEL, "tokenizer_config.json": f'{{"auth": "{TOKEN}"}}'.encode()})
    with pytest.raises(
        ShardmakeError, match=r"tokenizer_config\.json in the model contains what looks like a token"
    ) as error:
        push(make_run(push={"to": "file:published/chat"}), rundir)
    assert TOKEN not in str(error.value) and not Path("published").exists()


@pytest.mark.parametrize(
    "text", [text for text in SHAPES.values() if " " not in text and "=" not in text and "//" not in text]
)
def test_text_in_the_form_of_a_token_is_removed(text: str) -> None:
    assert find_secrets(f"before {text} after") and text not in redact(f"before {text} after")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it says password=Plant77w! here", "it says password=[removed] here"),
        ('{"api_key": "a-b-c-d-e"}', '{"api_key": "[removed]"}'),
        ("see https://ada:pa/ss@host/x", "see https://[removed]@host/x"),
        ("the password: any", "the password: any"),
    ],
)
def test_passwords_in_running_text_are_removed(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "SSH_KEY", "KEY_ID", "PGPASSWORD", "MY_SECRET_2"])
def test_variables_that_hold_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name) and not is_secret("KEYBOARD") and not is_secret("TOKENIZERS_PARALLELISM")


@pytest.mark.parametrize("text", ["hf_hub_download", "the tokenizer", "sk-learn", "AKIA", "/etc/ssl/private/host.pem"])
def test_ordinary_words_are_not_removed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MY_PASSWORD", "tokenizer")
    monkeypatch.setenv("SSL_KEY_FILE", "/etc/ssl/private/host.pem")
    assert redact(text) == text


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("sftp://ada:pw@host/x", "sftp://host/x"),
        ("s3://key:se/c+ret@bucket/x", "s3://bucket/x"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("hub:lab/x", "hub:lab/x"),
    ],
)
def test_user_and_password_are_removed_from_urls(url: str, public: str) -> None:
    assert public_url(url) == public


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ('["--hub_token", "abc"]', '["--hub_token", "[removed]"]'),
        ('["--hub_token=abc", "--lr=1"]', '["--hub_token=[removed]", "--lr=1"]'),
        ('["export WANDB_API_KEY=abc; x", "module load y"]', '["export WANDB_API_KEY=[removed]; x", "module load y"]'),
        ('{"comment": "a", "db-password": "b"}', '{"comment": "a", "db-password": "[removed]"}'),
        (f"s3://ada:{PASSWORD}@bucket/x", "s3://[removed]@bucket/x"),
        (f"echo {TOKEN}", "echo [removed]"),
    ],
)
def test_a_setting_is_masked_and_a_changed_secret_is_noticed(text: str, masked: str) -> None:
    found, _, digest = mask(text).rpartition(" #")
    assert found == masked and len(digest) == 8
    changed = text.replace("abc", "abd").replace(PASSWORD, "other").replace(TOKEN, TOKEN[::-1]).replace('"b"', '"c"')
    assert mask(changed) != mask(text)


@pytest.mark.parametrize(
    "text", ['["--max_new_tokens", "5"]', "org/tokenizer", "token_id: 4", "0.001", "s3://bucket/x"]
)
def test_a_setting_without_secrets_is_kept(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize("text", ["x" * 1_000_000, "a-" * 500_000, "token" * 20_000, "password" * 20_000])
def test_the_time_for_a_long_word_grows_with_its_length(text: str) -> None:
    """A pattern that tries every start against every end would take minutes, and pytest would end the test."""
    assert redact(text) == mask(text) == text
