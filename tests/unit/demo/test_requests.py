"""The demo's data set: requests in words, and the options of sbatch that they mean."""

import random
import re

from shardmake.demo.requests import Limit, Request, make_requests

REQUEST = Request(
    nodes=2, gpus=4, kind="h100", limit=Limit("two days", "2-00:00:00"), partition="long", memory=128, exclusive=True,
    requeue=True,
)  # fmt: skip


def test_options_are_in_one_order() -> None:
    assert REQUEST.options() == (
        "--nodes=2 --gpus-per-node=h100:4 --time=2-00:00:00 --partition=long --mem=128G --exclusive --requeue"
    )


def test_a_sentence_says_everything_that_the_options_say() -> None:
    rng = random.Random(0)
    sentences = {REQUEST.sentence(rng) for _ in range(200)}
    assert len(sentences) > 100, "many phrasings"
    for sentence in sentences:
        assert re.search(r"\b(2|two) nodes,.*H100", sentence) and re.search(r"\b(4|four)\b.* H100", sentence)
        assert "two days" in sentence and " long" in sentence and "128 GB" in sentence
        assert re.search("nobody else|for me alone", sentence) and re.search("restart it|be restarted", sentence)


def test_requests_differ_and_are_the_same_every_time() -> None:
    first = make_requests(500, random.Random(1))
    assert len(set(first)) == 500 and first == make_requests(500, random.Random(1))


def test_every_option_has_a_valid_value() -> None:
    time = re.compile(r"(\d-)?\d\d:\d\d:00")
    for request in make_requests(500, random.Random(2)):
        options = dict(re.findall(r"--([a-z-]+)=(\S+)", request.options()))
        assert time.fullmatch(options["time"]) and int(options["nodes"]) in range(1, 17)
        assert options.keys() >= {"nodes", "gpus-per-node", "time"}
