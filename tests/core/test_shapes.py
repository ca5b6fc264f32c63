"""The built-in dataset: the same everywhere, and to be told by form alone."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rungs import flags
from torch import nn

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


def test_no_two_images_are_alike_and_every_class_comes_as_often():
    images, labels = shapes.render(0, range(5000))
    assert len({image.tobytes() for image in images}) == 5000
    assert np.bincount(labels, minlength=10).min() > 400
    other, _ = shapes.render(1, range(5000))
    assert not {image.tobytes() for image in images} & {image.tobytes() for image in other}


@pytest.fixture(scope="module")
def drawn():
    """12000 images to learn from and 3000 to test on: floats in 0..1 (N, 3, 32, 32), and labels."""
    images, labels = (torch.from_numpy(part) for part in shapes.render(0, range(15000)))
    return images.float() / 255, labels


def accuracy_of_probe(features, labels, hidden):
    """Return the test accuracy in percent of a classifier, with or without a hidden layer."""
    torch.manual_seed(0)
    features = (features - features.mean(0)) / features.std(0)
    width = features.shape[1]
    net = nn.Linear(width, 10)
    if hidden:
        net = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    train = slice(0, 12000)
    test = slice(12000, None)
    for _ in range(15):
        for batch in torch.randperm(12000).split(128):
            loss = F.cross_entropy(net(features[train][batch]), labels[train][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * (net(features[test]).argmax(1) == labels[test]).float().mean().item()


@pytest.mark.slow
def test_colours_alone_do_not_give_the_class_away(drawn):
    images, labels = drawn
    # every colour level, no place
    colours = images.flatten(2).sort(dim=2).values[:, :, ::8].flatten(1)
    assert accuracy_of_probe(colours, labels, hidden=True) < 40


@pytest.mark.slow
def test_a_linear_classifier_stays_under_60_percent(drawn):
    images, labels = drawn
    assert accuracy_of_probe(images.flatten(1), labels, hidden=False) < 60


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
