"""The interpreter of pickles: the objects of the standard library's one, in memory and time that the length bounds."""

import collections
import pickle
import struct
from typing import Any

import pytest

from shardmake.checkpoint.formats.pickle_machine import Inert, PickleError, PickleMachine

VALUE = {
    "none": None, "flags": [True, False], "integers": [0, 255, 65535, -1, 2**31, -(2**63), 2**200, -(2**200)],
    "floats": (1.5, -0.0, 1e300), "text": ["", "a" * 300, "\u00fc\u20ac", "\ud800"],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, 2), (3, (4,)))),
    ("a", 1): {1: [], 2.5: {}}, "many": list(range(3000)), "pairs": {str(index): index for index in range(3000)},
}  # fmt: skip
PROTOCOL_4 = b"\x80\x04"


def run(content: bytes) -> Any:
    return PickleMachine(content, {}, lambda pid: pid).run()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_are_those_of_the_standard_library(protocol: int) -> None:
    value = {**VALUE, "bytes": b"\0\xff"} if protocol > 2 else VALUE
    shared = [value, value]
    read = run(pickle.dumps(shared, protocol))
    assert read == shared and read[0] is read[1]


def test_an_object_in_itself_a_state_of_another_object_and_a_dotted_name() -> None:
    value: list[Any] = []
    value.append((value,))
    read = run(pickle.dumps(value, 4))
    assert read[0][0] is read
    content = pickle.dumps(collections.OrderedDict(a=1), 4)[:-1] + b"}\x8c\x05items" + b"Nsb."
    functions = {("collections", "OrderedDict"): PickleMachine.ordered}
    read = PickleMachine(content, functions, lambda pid: pid).run()
    assert list(read.items()) == [("a", 1)]
    read = run(PROTOCOL_4 + b"\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93)R.")
    assert str(read.kind) == "collections.OrderedDict.fromkeys"


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"], ids=["Python 3.12", "Python 3.13"])
def test_a_path_is_a_placeholder(module: str) -> None:
    name = bytes([0x8C, len(module)]) + module.encode()
    path, number = run(PROTOCOL_4 + b"]\x94(" + name + b"\x8c\tPosixPath\x93\x8c\x02/a\x85RK\x07e.")
    assert isinstance(path, Inert) and path.kind.name == "PosixPath" and number == 7


@pytest.mark.parametrize("content", [
    PROTOCOL_4 + b"})" + 60 * b"2\x86" + b"Ns.",  # a key whose hash takes 2**60 steps
    PROTOCOL_4 + b"})" + 100_000 * b"\x85" + b"Ns.",
    PROTOCOL_4 + b"(" + 100_000 * b"N" + b"t\x940}" + 100_000 * b"h\0Ns" + b".",
    PROTOCOL_4 + b"X" + struct.pack("<I", 2**32 - 1) + b"a.", PROTOCOL_4 + b"\x8e" + struct.pack("<Q", 2**63) + b"a.",
    PROTOCOL_4 + b"\x8b" + struct.pack("<I", 100_000) + 100_000 * b"\x7f" + b".", PROTOCOL_4 + b"NR.",
    PROTOCOL_4 + b"N)R.", PROTOCOL_4 + b"]}s.", PROTOCOL_4 + b"](NNu.", PROTOCOL_4 + b"}(Nu.", PROTOCOL_4 + b"}]Ns.",
    PROTOCOL_4 + b"Na.", PROTOCOL_4 + b"NN\x93.", PROTOCOL_4 + b"cposix\n" + 2000 * b"x" + b"\n.",
    PROTOCOL_4 + b"cposix", PROTOCOL_4 + b"i.", PROTOCOL_4 + b"\x82\x01.", PROTOCOL_4 + b"h\x05.", PROTOCOL_4 + b"1.",
    PROTOCOL_4 + b".", PROTOCOL_4, b"\x80\x02Nr\xff\xff\xff\x7f.", b"\x80\x01N.", b"(lp0\n.", b"",
])  # fmt: skip
def test_pickle_that_no_checkpoint_has(content: bytes) -> None:
    with pytest.raises(PickleError):
        run(content)
