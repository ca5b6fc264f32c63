"""Models by name."""

import pytest
import torch
import torchvision
from rungs import flags
from torch.nn import functional as F

from common.errors import UserError
from common.memory import MemoryImages
from common.models import CifarResNet20, MnistNet, PaddedShortcut, build_model


def images(channels, size, classes=10):
    pixels = torch.zeros(4, channels, *size, dtype=torch.uint8)
    return MemoryImages(pixels, torch.zeros(4, dtype=torch.int64), num_classes=classes)


def written_out(model, images, training):
    """The output of MnistNet as in the MNIST example of PyTorch: one line per layer."""
    conv1, conv2, fc1, fc2 = (layer for layer in model.modules() if hasattr(layer, "weight"))
    x = F.relu(F.conv2d(images, conv1.weight, conv1.bias))
    x = F.relu(F.conv2d(x, conv2.weight, conv2.bias))
    x = F.max_pool2d(x, 2)
    x = F.dropout(x, 0.25, training)
    x = torch.flatten(x, 1)
    x = F.relu(F.linear(x, fc1.weight, fc1.bias))
    x = F.dropout(x, 0.5, training)
    return F.linear(x, fc2.weight, fc2.bias)


def test_mnist_net_computes_what_its_layers_written_out_compute():
    weights = (9 * 32 + 32) + (9 * 32 * 64 + 64) + (9216 * 128 + 128) + (128 * 10 + 10)
    assert sum(p.numel() for p in MnistNet().parameters()) == weights == 1_199_882
    for training in (False, True):
        model = MnistNet().train(training)
        images = torch.randn(4, 1, 28, 28)
        torch.manual_seed(1)  # the same dropout in both
        output = model(images)
        torch.manual_seed(1)
        torch.testing.assert_close(output, written_out(model, images, training))


def test_cifar_resnet20_has_the_layers_and_weights_of_the_paper():
    """He et al. 2015, table 6: 0.27 M; 7, 6 and 6 layers at 32, 16 and 8 pixels, and the last."""
    model = CifarResNet20()
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    sizes = []
    for layer in convolutions:
        layer.register_forward_hook(lambda layer, _, output: sizes.append(tuple(output.shape[1:])))
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == 7 * [(16, 32, 32)] + 6 * [(32, 16, 16)] + 6 * [(64, 8, 8)]
    stages = 9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    weights = sum(p.numel() for p in model.parameters())
    assert weights == stages + norms + 64 * 10 + 10 == 269_722


def test_a_block_of_cifar_resnet20_adds_every_second_pixel_and_zero_channels():
    features = torch.rand(1, 2, 5, 4)
    output = PaddedShortcut()(features)
    assert output[:, :2].equal(features[:, :, [0, 2, 4]][:, :, :, [0, 2]])
    assert output[:, 2:].shape == (1, 2, 3, 2) and not output[:, 2:].any()


def test_models_fit_the_channels_and_classes_of_a_dataset():
    own = ["mnist_net", "small_net", "cifar_resnet20"]
    for arch in (*own, "resnet18", "mobilenet_v3_small"):
        for channels, size in ((1, (28, 28)), (3, (32, 48))):
            model = build_model(flags("--arch", arch), images(channels, size, classes=7))
            assert model.training
            assert model(torch.rand(2, channels, *size)).shape == (2, 7)


def test_models_with_a_second_output_give_only_the_first():
    for arch in ("googlenet", "inception_v3"):
        model = build_model(flags("--arch", arch), images(3, (96, 96)))
        assert model(torch.rand(2, 3, 96, 96)).shape == (2, 10)


def test_a_stem_for_grey_images_keeps_the_rest_of_the_model():
    torch.manual_seed(0)
    colour = build_model(flags(), images(3, (32, 32))).state_dict()
    grey = build_model(flags(), images(1, (28, 28))).state_dict()
    assert {k for k in colour if colour[k].shape != grey[k].shape} == {"conv1.weight"}
    stem = build_model(flags(), images(1, (28, 28))).conv1
    original = torchvision.models.resnet18().conv1
    for name in ("out_channels", "kernel_size", "stride", "padding", "bias"):
        assert getattr(stem, name) == getattr(original, name)


def test_a_vision_transformer_takes_images_of_its_patch_size_or_larger():
    model = build_model(flags("--arch", "vit_b_16"), images(1, (32, 32)))
    assert model.conv_proj.bias is not None, "the new stem has a bias as the old one"
    assert model.encoder.pos_embedding.shape == (1, 1 + 2 * 2, 768)
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 10)


def test_a_model_made_for_other_images_says_so_in_one_line():
    for arch, side in (("alexnet", 32), ("vit_b_16", 28)):
        found = rf"--arch {arch} cannot take {side}x{side} images \(.{{20,}}\); try resnet18"
        with pytest.raises(UserError, match=found) as caught:
            build_model(flags("--arch", arch), images(3, (side, side)))
        assert "\n" not in str(caught.value)
