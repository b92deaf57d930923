"""Plans of fused ops in numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import MAX_CHUNKS, GemmConfig
from tileflux.kernels.shards import gather_shards, scatter_shards, slab_shards, spread_shards

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


@given(
    num_columns=st.integers(1, 3000) | st.integers(1, 200).map(lambda count: 16 * count),
    num_slabs=st.integers(1, MAX_CHUNKS), block_n=st.sampled_from([16, 128, 256]), by_copies=st.booleans(),
)  # fmt: skip
def test_slabs_that_are_multiplied_by_themselves_are_equally_wide(
    num_columns: int, num_slabs: int, block_n: int, by_copies: bool
) -> None:
    config = GemmConfig(16, block_n, num_chunks=num_slabs)
    plan = slab_shards("op", (3, 0, 5), 40, num_columns, 2, config, by_copies=by_copies)
    slabs = plan.slabs(num_columns)
    assert 1 <= len(slabs) <= num_slabs and {len(slab) for slab in slabs} == {num_columns // len(slabs)}
    assert plan.slab_columns % 16 == 0, "else the next does not begin aligned"
    best = max((count for count in range(1, num_slabs + 1) if num_columns % (16 * count) == 0), default=1)
    assert best / 2 <= len(slabs) <= best
    if len(slabs) < best:
        assert plan.slab_columns % block_n == 0, "fewer for nothing"
    usual = scatter_shards("op", (3, 0, 5), num_columns, 2, config)
    assert plan.data_bytes == usual.data_bytes // (2 if by_copies else 1) and plan.num_flags == MAX_CHUNKS
    assert plan.staging_bytes >= 3 * plan.slot_bytes + 40 * len(slabs[0]) * 2


def test_slabs_are_whole_tiles_where_that_is_not_far_too_wide() -> None:
    for num_columns, block_n, wanted in ((8192, 256, 1024), (5120, 256, 1024), (7168, 256, 1024), (2880, 128, 360)):
        config = GemmConfig(16, block_n, num_chunks=8)
        found = slab_shards("op", (3, 5), 40, num_columns, 2, config).slab_columns
        assert found == (wanted if wanted % 16 == 0 else 480), num_columns
