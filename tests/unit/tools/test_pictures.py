"""The pictures in the documentation show the stages of today."""

from tools.pictures import IMAGES, rule_graph

STAGES = ("fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push", "report")


def test_both_pictures_name_every_stage() -> None:
    for name in ("pipeline.svg", "rules.svg"):
        picture = (IMAGES / name).read_text()
        assert [stage for stage in STAGES if f">{stage}</text>" not in picture] == [], f"{name}: run make docs"


def test_a_rule_is_named_by_its_stage() -> None:
    found = (
        'digraph {\n\t0[label = "all", color = "0 1 1"];\n\t1[label = "fetch_weights_run", color = "x"];\n\t1 -> 0\n}'
    )
    expected = ['  all [label="all"];', "  fetch_weights_run -> all;", '  fetch_weights_run [label="fetch weights"];']
    assert rule_graph(found) == "\n".join(expected)
