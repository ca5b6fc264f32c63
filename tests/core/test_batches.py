"""GlobalBatchSampler: every image once on any number of ranks, in an order of its own."""

import pytest

from imagenet.sampler import GlobalBatchSampler


@pytest.mark.parametrize("images", [7, 24, 101])
@pytest.mark.parametrize("batch_size", [1, 6, 10])
def test_any_world_takes_the_images_of_a_step_once_each(images, batch_size):
    alone = GlobalBatchSampler(images, batch_size, 0, 1, seed=3)
    alone.set_epoch(2)
    steps = [sorted(batch) for batch in alone]
    assert sorted(key for step in steps for key in step) == [(2, k) for k in range(images)]
    assert len(steps) == alone.steps == len(alone)
    assert max(map(len, steps)) <= batch_size and max(map(len, steps)) - min(map(len, steps)) <= 1
    for world_size, accumulate in ((2, 1), (3, 2), (5, 3)):
        ranks = [
            GlobalBatchSampler(images, batch_size, r, world_size, accumulate, seed=3)
            for r in range(world_size)
        ]
        first = alone.steps // 2
        for batches in ranks:
            batches.set_epoch(2, first)
        pieces = [list(batches) for batches in ranks]
        assert {len(batches) for batches in ranks} == {(alone.steps - first) * accumulate}
        for k, step in enumerate(steps[first:]):
            taken = [rank[k * accumulate + micro] for rank in pieces for micro in range(accumulate)]
            assert sorted(key for piece in taken for key in piece) == step
            sizes = set(map(len, taken))
            assert max(sizes) - min(sizes) <= 1 and len(step) == ranks[0].step_size(first + k)
            fewest, most = ranks[0].micro_batch_sizes()
            assert fewest <= min(sizes) and max(sizes) <= most


def test_the_order_changes_with_the_epoch_and_the_seed_alone():
    def order(seed, epoch):
        batches = GlobalBatchSampler(50, 10, 0, 1, seed=seed)
        batches.set_epoch(epoch)
        return [index for batch in batches for _, index in batch]

    assert order(0, 1) == order(0, 1) and order(0, 1) != order(0, 2) != order(5, 2)
    assert [index for batch in GlobalBatchSampler(50, 10, 0, 1) for _, index in batch] == list(
        range(50)
    ), "tests in order"
