"""The digest of a rank's first rows, and the comparison between ranks."""

import pytest
import torch

from shardmake.train.first_batch import conflict, count_rows, digest_rows, exchange

ROWS = torch.arange(12).reshape(3, 4)


def test_rows_are_counted_and_ranks_exchange_text(one_rank: None) -> None:
    assert count_rows(ROWS) == 3
    assert count_rows(({"scale": torch.tensor(2.0), "position": torch.zeros(7), "input_ids": ROWS}, ())) == 3
    assert count_rows(({}, [torch.tensor(1.0), "text"])) is None
    assert exchange("abc") == ["abc"]


def test_the_digest_depends_on_every_value_and_not_on_the_container() -> None:
    batch = digest_rows({"input_ids": ROWS, "labels": ROWS})
    assert digest_rows([ROWS.clone(), ROWS.clone()]) == batch
    assert digest_rows({"input_ids": ROWS, "labels": ROWS + 1}) != batch
    assert digest_rows(ROWS.reshape(4, 3)) != digest_rows(ROWS)
    assert digest_rows(ROWS.to(torch.bfloat16)) != digest_rows(ROWS)
    assert digest_rows({"count": torch.tensor(3), "use_cache": False}) == ""


def test_each_row_has_a_digest_of_its_own() -> None:
    first, second, third = digest_rows({"input_ids": ROWS, "labels": ROWS}).split(",")
    assert digest_rows({"input_ids": ROWS[1:], "labels": ROWS[1:]}) == f"{second},{third}"
    changed = {"input_ids": ROWS, "labels": ROWS + torch.tensor([[1], [0], [0]])}
    assert digest_rows(changed).split(",")[1:] == [second, third] and digest_rows(changed).split(",")[0] != first
    assert "," not in digest_rows({"input_ids": ROWS, "position": torch.zeros(7)})


def test_a_row_is_the_same_with_more_padding_on_either_side() -> None:
    mask, row = torch.ones(1, 4, dtype=torch.int64), ROWS[:1]

    def batch(*sides: int) -> dict[str, torch.Tensor]:
        pad = torch.nn.functional.pad
        return {
            "input_ids": pad(row, sides, value=9), "attention_mask": pad(mask, sides),
            "labels": pad(row, sides, value=-100),
        }  # fmt: skip

    assert digest_rows((batch(0, 0),)) == digest_rows((batch(0, 3),)) == digest_rows((batch(5, 1),))
    hidden = batch(0, 3) | {"attention_mask": torch.ones(1, 7)}
    assert digest_rows(hidden) != digest_rows(batch(0, 3))
    assert digest_rows(batch(0, 0) | {"weight": torch.tensor([2.0])}) != digest_rows(batch(0, 0))


@pytest.mark.parametrize(("digests", "tensor_parallel", "ranks"), [
    (["a", "b", "c", "d"], 1, None), (["a", "b", "c", "a"], 1, (0, 3)), (["a", "a", "b", "b"], 1, (0, 1)),
    (["a", "a", "b", "b"], 2, None), (["a", "a", "a", "a"], 2, (0, 2)), (["a", "b", "c", "c"], 2, (0, 1)),
    (["a,b,c", "d,e,f", "g,h,c", "i,j,k"], 1, None), (["a,b,c", "d,e,f", "g,b,c", "i,j,k"], 1, (0, 2)),
    (["a,b,b", "d,e,f", "g,a,b", "i,j,k"], 1, None), (["a,b", "a,b", "b,c", "b,c"], 2, None),
    (["a,b,c", "a,b,c", "b,c,d", "b,c,d"], 2, (0, 2)), (["a,b", "b,a"], 2, (0, 1)),
])  # fmt: skip
def test_equal_rows_are_right_exactly_within_a_tensor_parallel_group(
    digests: list[str], tensor_parallel: int, ranks: tuple[int, int] | None
) -> None:
    assert conflict(digests, tensor_parallel) == ranks
