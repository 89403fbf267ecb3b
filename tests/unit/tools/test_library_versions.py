"""The versions of ``make test-oldest``, ``test-newest`` and ``test-versions``."""

from tools.install_torch import CONSTRAINTS
from tools.library_versions import other_pins, requirements


def test_oldest_and_newest_are_those_of_the_supported_range() -> None:
    oldest = requirements(["oldest"])
    assert {"torch==2.11.*", "typer==0.24.*"} <= set(oldest)
    assert all("." in text.partition("==")[2].removesuffix(".*") for text in oldest), "5.* is not the oldest 5"
    assert {"torch>=2.11", "snakemake<10,>=9.27"} <= set(requirements(["newest"]))
    assert requirements(["torch==2.12.1", "peft==0.22"]) == ["torch==2.12.1", "peft==0.22"]


def test_the_other_libraries_keep_their_pins() -> None:
    pins = [line.partition("==")[0] for line in other_pins(CONSTRAINTS.read_text(), ["torch==2.11.*"])]
    assert {"sympy", "transformers"} <= set(pins) and not {"torch", "triton"} & set(pins)
