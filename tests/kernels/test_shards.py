"""Plans of fused ops in numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import MAX_CHUNKS, GemmConfig
from tileflux.kernels.shards import gather_shards, scatter_shards, spread_shards

CONFIG = GemmConfig(block_m=16, block_n=32)
rows = st.lists(st.integers(0, 5000) | st.just(0), min_size=1, max_size=16).filter(any).map(tuple)


@given(rows=rows, row_bytes=st.integers(1, 300), scaled=st.booleans(), num_chunks=st.integers(1, MAX_CHUNKS))
def test_gathered_rows_are_cut_into_whole_tiles(
    rows: tuple[int, ...], row_bytes: int, scaled: bool, num_chunks: int
) -> None:
    plan = gather_shards("op", rows, row_bytes, scaled, num_chunks)
    assert 1 <= plan.num_chunks <= num_chunks and plan.num_flags == MAX_CHUNKS
    assert plan.chunk_rows % 256 == 0 or plan.num_chunks == 1
    assert plan.chunk_rows <= max(1, *rows), "steps that are no tile on any rank"
    for rank, count in enumerate(rows):
        chunks = [plan.chunk(rank, index) for index in range(plan.num_chunks)]
        assert [row for chunk in chunks for row in chunk] == list(range(count))
        assert plan.first_rows[rank] == sum(rows[:rank])
    assert plan.chunk(rows.index(max(rows)), plan.num_chunks - 1), "a chunk that nobody has"
    if scaled:
        assert plan.scales >= sum(rows) * row_bytes and plan.scales % 4 == 0
        assert plan.data_bytes == plan.scales + 4 * sum(rows)
    else:
        assert plan.data_bytes == sum(rows) * row_bytes


@given(rows=rows, num_columns=st.integers(1, 300), itemsize=st.sampled_from([2, 4]))
def test_slots_hold_the_longest_shard_twice_for_every_source(
    rows: tuple[int, ...], num_columns: int, itemsize: int
) -> None:
    plan = scatter_shards("op", rows, num_columns, itemsize, CONFIG)
    assert plan.slot_bytes >= max(rows) * num_columns * itemsize and plan.slot_bytes % 16 == 0
    assert plan.data_bytes % 512 == 0 and plan.data_bytes // 2 >= len(rows) * plan.slot_bytes
    assert (plan.num_chunks, plan.chunk_rows) == (1, max(rows))
    assert plan.num_flags == -(-max(rows) // 16) * -(-num_columns // 32)
    spread = spread_shards("op", len(rows), sum(rows), num_columns, itemsize, CONFIG)
    assert spread.slot_bytes >= sum(rows) * num_columns * itemsize and spread.chunk_rows == sum(rows)
    assert spread.data_bytes // 2 >= len(rows) * spread.slot_bytes
    assert spread.num_flags == -(-sum(rows) // 16) * -(-num_columns // 32)
