"""The built-in dataset: the same everywhere."""

import hashlib

import numpy as np
import torch
from rungs import flags

from common import shapes
from common.data import build_datasets
from common.memory import choose


def test_an_image_depends_on_its_seed_and_index_alone():
    images, labels = shapes.render(0, range(500))
    for order in ([499, 3, 77], [3], [3, 3, 499, 0]):
        some, some_labels = shapes.render(0, order)
        assert np.array_equal(some, images[order]) and np.array_equal(some_labels, labels[order])
    assert not np.array_equal(shapes.render(1, [3])[0], images[[3]])


def test_the_bytes_are_the_same_on_every_platform():
    images, labels = shapes.render(0, range(5000))
    assert (
        images.dtype == np.uint8 and images.shape == (5000, 3, 32, 32) and labels.dtype == np.int64
    )
    digest = hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()
    assert digest == "65ba7231c94d434118923c1dbe15f216486297c7c267b71309957b0dea6188f4"


def test_the_test_set_is_drawn_with_a_seed_of_its_own():
    train, test = build_datasets(flags("--limit", 300))
    images, labels = shapes.render(1, range(10_000))
    assert torch.equal(test.images, torch.from_numpy(images))
    assert torch.equal(test.targets, torch.from_numpy(labels))
    images, labels = shapes.render(0, choose(50_000, 300))
    assert torch.equal(train.images, torch.from_numpy(images))
    assert torch.equal(train.targets, torch.from_numpy(labels))
    trained, tested = ({image.numpy().tobytes() for image in part.images} for part in (train, test))
    assert len(trained) == 300 and not trained & tested
