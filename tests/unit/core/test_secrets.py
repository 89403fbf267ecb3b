"""Place secrets in all inputs of a run, and search all of its outputs for them."""

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.config.load import parse_config
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.core.secrets import find_secrets, is_secret, keys_of_tokens, mask, public_url, redact
from shardmake.push.stage import push
from shardmake.report.stage import write_report
from shardmake.run.evaluation import Sample
from tests.finished_run import EVALUATED, MODEL, make_run, make_rundir, write_model
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
        for name, value in (("HF_ENDPOINT", server.url), ("HF_TOKEN", TOKEN), ("AWS_SECRET_ACCESS_KEY", SECRET)):
            monkeypatch.setenv(name, value)
        yield server


SHAPES = {
    "hub": f"«{TOKEN}»", "AWS, a key": "«AKIAIOSFODNN7EXAMPLE»", "AWS for a session": "«ASIAIOSFODNN7EXAMPLE»",
    "GitHub": "«ghp_" + "a1" * 18 + "»", "GitHub, fine-grained": "«github_pat_" + "a1" * 20 + "»",
    "GitLab": "«glpat-" + "a1-B" * 5 + "»", "Slack, a token": "«xoxb-123456789012-abcdef»",
    "OpenAI": "«sk-proj-" + "a1B2" * 6 + "»", "W&B": "«wandb_v1_" + "a1B2" * 8 + "»",
    "W&B, older": "wandb login «" + "0123abcdef" * 4 + "»",
    "JWT": "«eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl»",
    "URL with slashes": "https://«ada:pa/ss/w0rd»@host/x", "password": "password=«Plant77w!»",
    "secret": 'client_secret: "«Plant78w!»"', "key": "api-key=«Plant79w!»",
    "header": "Authorization: Bearer «Plant80w.x/y»", "header of a login": "authorization: Basic «UGxhbnQ4MXc»",
    "curl": "curl -s -u ada:«Plant82w!»", "private key": "«-----BEGIN OPENSSH PRIVATE KEY-----»",
}  # fmt: skip
"""A text of each form; what stands in guillemets is secret, all else stays."""
BY_NAME = {
    "MY_DB_PASSWORD": "hunter2w", "SIGNING_KEY": "zebra-42", "BOT_TOKEN": "x.y.z.1234", "THE_SECRET": "q1w2e3r4",
    "OTHER_PASSWORD": "SecretHorse", "MY_PASSPHRASE": "correct horse battery",
}  # fmt: skip
LOGINS = ("-u ada:Pl,82", "--user=ada:Pl,82", "--user 'ada:Pl,82 w'", "-uada:Pl,82", "-su ada:Pl,82", "--proxy-user ada:Pl,82")  # fmt: skip


@pytest.mark.parametrize("login", LOGINS)
def test_a_login_of_curl_is_removed_and_a_configuration_with_one_is_refused(login: str) -> None:
    command = f"curl -s {login} https://host"
    for text in (redact(command), mask(command)):
        assert "Pl,82" not in text and "https://host" in text
    assert keys_of_tokens({"notify": {"command": command}}) == ["notify.command"]
    assert keys_of_tokens({"notify": {"command": command.split()}}) == ["notify.command"]


def test_the_name_of_a_variable_and_other_users_are_no_login() -> None:
    for harmless in ("curl -u ada:$PASSWORD x", "Authorization: Bearer $TOKEN", "docker run --user 1000:100000 x"):
        assert redact(harmless) == harmless and keys_of_tokens({"notify": {"command": harmless.split()}}) == []


BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj"
OF_PROGRAMS = {
    "wget": "wget --user=ada --http-password=«Plant-90» https://host/x",
    "wget, two words": "wget --user ada --password «Plant-91» https://host/x",
    "a phrase": "wget --ask --ftp-password «correcthorsebattery» x",
    "sshpass": "sshpass -p «Plant-92» ssh host",
    "docker": "docker login -u ada -p «Plant-93» registry.example",
    "Docker's file": '{"auths": {"r.example": {"auth": "«YWRhOlBsYW50LTk0»"}}}',
    "npm's file": "//registry.example/:_authToken=«Plant-95»",
    "npm": "«npm_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2»",
    "PyPI": "«pypi-AgEIcHlwaS5vcmcCJGE1Yjct-w_x»",
    "pip": "pip install --index-url https://«ada:Plant-96»@host/simple",
    "conda": "https://conda.anaconda.org/t/«ab-12345678-1234-1234-1234-123456789abc»/channel",
    "git": "git -c http.extraHeader='AUTHORIZATION: basic «YWRhOlBsYW50LTk3»' clone x",
    "git credential": "username=ada\npassword=«Plant-98»\n",
    "rclone": "[lab]\ntype = sftp\npass = «x2Yt-plantPlantPlant-9_»",
    "rclone's token": 'token = {"access_token":"«ya29.a0AfPlant-Plant_Plant»","expiry":"2026"}',
    "AWS": "aws configure set aws_secret_access_key «wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX»",
    "AWS, a session": "AWS_SESSION_TOKEN=«FwoGZXIvYXdzEPlant//w==»",
    "Azure, a key": "DefaultEndpointsProtocol=https;AccountName=lab;AccountKey=«Plant/99+w==»;EndpointSuffix=x",
    "Azure, a signature": "https://lab.blob.core.windows.net/c/m?sv=2022&sp=r&sig=«Plant%2B100%3D»&se=2026",
    "Azure, a connection": "SharedAccessSignature=«sv=2022&sig=Plant-101»",
    "Azure, a client": "az login -p «abc8Q~Plant.Plant.Plant.Plant.Plant-1»",
    "S3, a signed URL": "https://b.s3.amazonaws.com/x?X-Amz-Credential=«ada/2026»&X-Amz-Signature=«0a1b2c3d4e5f»",
    "Google": "https://maps.example/x?key=«AIzaSyPlantPlantPlantPlantPlantPlant_-12»",
    "netrc": "machine api.wandb.ai login user password «Plant-102»",
    "netrc, lines": "machine host\n  login ada\n  password «plantplant»\n",
    "netrc, one line": "  password «Plant-103»",
    "Bearer": "header: Bearer «abc.DEF.1234567890-_~»",
    "Basic": "proxy says Basic «YWRhOlBsYW50LTEwNA==» is wrong",
    "Slurm": "sbatch --export=ALL,LAB_TOKEN=«Plant-105»,X=y job.sh",
    "GitLab, a runner": "«glrt-PlantPlantPlantPlant»",
    "Slack": "curl https://hooks.slack.com/services/«T000/B000/PlantPlant»",
    "a private key": f"«-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128\n{BODY}\nplant=\n-----END RSA PRIVATE KEY-----»",
    "a private key in JSON": f"'key': '«-----BEGIN PRIVATE KEY-----\\n{BODY}\\nab=\\n-----END PRIVATE KEY-----»'",
    "the beginning of one": f"«-----BEGIN OPENSSH PRIVATE KEY-----\n{BODY}\n{BODY}»",
    "a key in JSON": '{"api_key": "«a-b-c-d-e»"}',
}
"""Texts of programs, in the same way."""
FORMS = SHAPES | OF_PROGRAMS


def planted(text: str) -> tuple[str, list[str], str]:
    """Return a text of `FORMS`, its secrets, and what stays of it."""
    marked = re.compile("«(.*?)»", re.DOTALL)
    return marked.sub(r"\1", text), marked.findall(text), marked.sub("[removed]", text)


@pytest.mark.parametrize("name", FORMS)
def test_a_secret_is_removed_and_nothing_else(name: str) -> None:
    text, secrets, expected = planted(FORMS[name])
    found = redact(f"before\n{text}\nafter word", ())
    assert secrets and found == f"before\n{expected}\nafter word"
    assert not any(secret in mask(text) for secret in secrets)


def test_no_secret_reaches_any_output(
    hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does any form of a secret that a sample of the model has reach the card, the report or the records."""
    rundir = make_rundir(tmp_path)
    to = ["hub:lab/chat", "file:published/chat", f"memory://ada:{PASSWORD}@models/chat"]
    logs = [rundir.attempts / "001" / "node-0.log", rundir.attempts / "001" / "errors.txt"]
    for log in logs:
        log.write_text(f"export HF_TOKEN={TOKEN} AWS_SECRET_ACCESS_KEY={SECRET}\n")
    samples = [Sample(prompt="What is the token?", base=TOKEN, tuned=f"It is {SECRET}.")]
    forms = [planted(shape) for shape in SHAPES.values()]
    samples += [Sample(prompt=text, base=f"a {text}", tuned=text) for text, _, _ in forms]
    EVALUATED.model_copy(update={"samples": samples}).write(rundir.evaluation)
    run = make_run(push={"to": to, "samples": True})
    push(run, rundir)
    write_report(run, rundir)
    hub.fail(".*", times=99, status=403, message="no")
    with pytest.raises(ShardmakeError) as refused:
        push(run, rundir)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path not in (*logs, rundir.evaluation)]
    assert {"README.md", "report.html", "receipt.json"} <= {path.name for path in written}
    texts = {str(path): path.read_bytes().decode(errors="replace") for path in written}
    assert "[removed]" in texts[str(tmp_path / "published/chat/README.md")]
    texts |= {"terminal": "".join(capfd.readouterr()), "log": caplog.text, "error": str(refused.value)}
    secrets = {TOKEN, SECRET, PASSWORD, *(secret for _, found, _ in forms for secret in found)}
    assert [(name, secret) for name, text in texts.items() for secret in secrets if secret in text] == []


LEAK = """
import logging, sys, typer
from shardmake import cli
from shardmake.core.errors import ShardmakeError
@cli.app.command()
def leak(how: str):
    logger, text = logging.getLogger('shardmake.leak'), sys.stdin.read()
    logger.info('info %s', text); logger.warning('warning %s', text); typer.echo(f'echo {text}')
    print('print', text); print('error', text, file=sys.stderr)
    raise ShardmakeError(f'Failed: {text}') if how == 'known' else ValueError(f'bug {text}')
cli.main()
"""


def outputs_of_a_command(text: str, tmp_path: Path) -> dict[str, str]:
    """Return what a command prints, logs, warns, raises and keeps, if each of these has ``text``."""
    found = {}
    (tmp_path / "logs").mkdir(exist_ok=True)
    for words in (["leak", "known"], ["--verbose", "leak", "bug"]):
        command, variables = [sys.executable, "-c", LEAK, *words], os.environ | BY_NAME
        done = subprocess.run(command, input=text, cwd=tmp_path, capture_output=True, text=True, env=variables)
        assert done.returncode != 0 and (done.stdout + done.stderr).count("[removed]") >= 6, done.stderr
        found[words[-1]] = done.stdout + done.stderr
    return found | {str(path): path.read_text() for path in (tmp_path / "logs").iterdir()}


def test_no_form_of_a_secret_leaves_a_command(tmp_path: Path) -> None:
    """Terminal, log, warning, error, traceback and the file of a traceback, with all forms at once and by value."""
    forms = {name: planted(text) for name, text in FORMS.items()}
    texts = [*(forms[name][0] for name in SHAPES), *(f"it is {value}!" for value in BY_NAME.values())]
    found = outputs_of_a_command("\n".join([" ; ".join(texts), *(forms[name][0] for name in OF_PROGRAMS)]), tmp_path)
    assert len(found) == 3
    secrets = [*BY_NAME.items(), ("a line of a private key", BODY)]
    secrets += [(name, secret) for name, (_, values, _) in forms.items() for secret in values]
    assert [(name, place) for place, text in found.items() for name, value in secrets if value in text] == []


@pytest.mark.parametrize(("values", "key"), [
    ({"script_args": ["--hub_token", TOKEN]}, "runs.chat.script_args"),
    ({"script_args": ["--lr", "1", "--db-password", "Plant-glpat"]}, "runs.chat.script_args"),
    ({"script_args": ["--hub_token=Plant-glpat"]}, "runs.chat.script_args"),
    ({"model": f"lab/{TOKEN}"}, "runs.chat.model"),
    ({"notify": {"command": "curl -H 'Authorization: glpat-" + "a1-B" * 5 + "'"}}, "runs.chat.notify.command"),
])  # fmt: skip
def test_a_token_in_the_configuration_is_refused_without_printing_it(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: this looks like a token or key.* export it in") as error:
        parse_config({"cluster": "c.yaml", "runs": {"chat": values}}, "config.yaml")
    assert TOKEN not in str(error.value) and "glpat" not in str(error.value)


def test_ordinary_arguments_of_a_script_are_accepted() -> None:
    for words in (["--use_auth_token", "true"], ["--max_new_tokens", "100000"], ["--password-file", "/home/ada/file"]):
        assert keys_of_tokens({"script_args": words, "other": [3, "--secret"]}) == []


def test_a_model_file_with_a_token_is_not_pushed(hub: FakeHub, tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    write_model(rundir, {**MODEL, "tokenizer_config.json": f'{{"auth": "{TOKEN}"}}'.encode()})
    message = r"tokenizer_config\.json in the model contains what looks like a token"
    with pytest.raises(ShardmakeError, match=message) as error:
        push(make_run(push={"to": "file:published/chat"}), rundir)
    assert TOKEN not in str(error.value) and not Path("published").exists()


@pytest.mark.parametrize("value", [
    "pa/ss+w0rd==", 'pa"ss\\w0rd', "<pa&ss'w0rd>", "-----\nline 0123\n-----", "pä ss w0rd",
])  # fmt: skip
def test_a_known_secret_is_removed_however_it_is_written(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_PASSWORD", f"{value}\n")
    written = [value, json.dumps({"x": value}), repr([value]), f"https://host/?x={quote(value, safe='')}&y=1"]
    written += [jinja2.Environment(autoescape=True).from_string("{{ x }}").render(x=value), html.escape(value)]
    for text in (*written, urlencode({"x": value})):
        assert "0rd" not in redact(text) and "0123" not in redact(text), text


WORDS = st.sampled_from(
    ["Qwen2.5", "Llama-3.1", "sk", "hf", "gl", "pypi", "npm", "basic", "Bearer", "password", "token", "pass", "secret"]
)
NAMES = st.lists(WORDS, min_size=1, max_size=3).map("-".join)
HOSTS = st.sampled_from(["localhost:4873", "10.0.0.1:8000", "hub.example", "registry.example:5000"])
FOLLOWING = st.sampled_from(["is wrong", "of the model", "expected", "information", "protected areas"])
HARMLESS = st.one_of(
    st.tuples(NAMES, NAMES, st.sampled_from(["7B-Instruct", "1.5b", "finetune-of-qwen2-5-7b-instruct"])).map(
        lambda name: f"{name[0]}/{name[1]}-{name[2]}"
    ),
    st.binary(min_size=4, max_size=32).map(bytes.hex),
    st.lists(NAMES, min_size=1, max_size=5).map(lambda names: f"/home/ada/{'/'.join(names)}.json"),
    st.one_of(st.integers(), st.floats()).map(str),
    st.tuples(HOSTS, NAMES, NAMES).map(lambda url: f"https://{url[0]}/{url[1]}/@{url[2]}?page=2&sort=key"),
    st.tuples(WORDS, FOLLOWING).map(" ".join),
)


@given(st.lists(HARMLESS, max_size=6), st.sampled_from([" ", "\n", ", ", "; "]))
def test_names_digests_paths_numbers_and_addresses_stay(texts: list[str], between: str) -> None:
    text = between.join(texts)
    assert redact(text, ()) == text and find_secrets(text, ()) == []
    assert keys_of_tokens({"script_args": texts, "prompt": text}) == []


SETTINGS = ('["--max_new_tokens", "5"]', "org/tokenizer", "token_id: 4", "0.001", "s3://bucket/x")


@pytest.mark.parametrize("text", [
    "apptainer exec --pwd /project/llm image.sif", "PWD=/home/ada OLDPWD=/tmp", "export HF_TOKEN=$HF_TOKEN",
    "EOS_TOKEN=<|im_end|> PAD_TOKEN=151643 MAX_TOKENS=1000000", "Basic training of two models",
    "the option --password belongs to another program", "Enter password:\nLoading weights", "the password: any",
    "login with password authentication", "signature: forward(input_ids)", "hf_hub_download", "the tokenizer",
    "sk-learn", "AKIA", "/etc/ssl/private/host.pem", *SETTINGS,
])  # fmt: skip
def test_text_about_secrets_and_ordinary_words_stay(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MY_PASSWORD", "tokenizer")
    monkeypatch.setenv("SSL_KEY_FILE", "/etc/ssl/private/host.pem")
    assert redact(text) == redact(text, ()) == text and (text not in SETTINGS or mask(text) == text)


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "SSH_KEY", "KEY_ID", "PGPASSWORD", "MY_SECRET_2"])
def test_variables_that_hold_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name) and not is_secret("KEYBOARD") and not is_secret("TOKENIZERS_PARALLELISM")


def test_user_and_password_are_removed_from_urls() -> None:
    urls = ("sftp://ada:pw@host/x", "s3://key:se/c+ret@bucket/x", "s3://bucket/a@b", "hub:lab/x")
    assert [*map(public_url, urls)] == ["sftp://host/x", "s3://bucket/x", "s3://bucket/a@b", "hub:lab/x"]


@pytest.mark.parametrize(("text", "masked"), [
    ('["--hub_token", "abc"]', '["--hub_token", "[removed]"]'),
    ('["--hub_token=abc", "--lr=1"]', '["--hub_token=[removed]", "--lr=1"]'),
    ('["export WANDB_API_KEY=abc; x", "module load y"]', '["export WANDB_API_KEY=[removed]; x", "module load y"]'),
    ('{"comment": "a", "db-password": "b"}', '{"comment": "a", "db-password": "[removed]"}'),
    (f"s3://ada:{PASSWORD}@bucket/x", "s3://[removed]@bucket/x"), (f"echo {TOKEN}", "echo [removed]"),
])  # fmt: skip
def test_a_setting_is_masked_and_a_changed_secret_is_noticed(text: str, masked: str) -> None:
    found, _, digest = mask(text).rpartition(" #")
    assert found == masked and len(digest) == 8
    changed = text.replace("abc", "abd").replace(PASSWORD, "other").replace(TOKEN, TOKEN[::-1]).replace('"b"', '"c"')
    assert mask(changed) != mask(text)


@pytest.mark.parametrize("text", ["x" * 1_000_000, "a-" * 500_000, "token" * 20_000, "password" * 20_000])
def test_the_time_for_a_long_word_grows_with_its_length(text: str) -> None:
    """A pattern that tries every start against every end would take minutes, and pytest would end the test."""
    assert redact(text) == mask(text) == text
