"""DeepSpeed's buffer sizes as the rendered file gives them."""

from shardmake.memory.buckets import read_buckets


def test_buckets_are_read_from_the_rendered_section() -> None:
    section = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 7,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    buckets = read_buckets(section, 4096)
    assert (buckets.reduce_bucket_size, buckets.stage3_prefetch_bucket_size) == (4096**2, 7)
    assert (buckets.sub_group_size, buckets.overlap_comm, buckets.pin_memory) == (10**9, True, False)
