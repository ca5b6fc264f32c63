"""Fine-tuning in 06: other classes, frozen parts."""

from types import SimpleNamespace

import pytest
import torch
from imagenet_runs import final

from common.errors import UserError
from imagenet import finetune
from imagenet.model import build_model


def model_of(arch, num_classes, size=32):
    dataset = SimpleNamespace(channels=3, image_size=(size, size), num_classes=num_classes)
    return build_model(
        SimpleNamespace(arch=arch, channels_last=False, deterministic=False), dataset
    )


def test_a_new_head_replaces_the_last_layer_alone_and_says_so():
    for arch, head, size, old, new in (
        ("resnet18", "fc", 32, 4, 64),  # as many as its first layer has outputs
        ("mobilenet_v3_small", "classifier.3", 32, 4, 7),
        ("squeezenet1_1", "classifier.1", 64, 4, 7),
        ("small_net", "17", 32, 7, 7),
    ):
        model = model_of(arch, new, size)
        before = model_of(arch, old, size).state_dict()
        own = {name: value.clone() for name, value in model.state_dict().items()}
        weights, message = finetune.replace_head(model, before | {"aux.weight": torch.ones(2)}, new)
        model.load_state_dict(weights)
        for name, value in model.state_dict().items():
            kept = own if name.startswith(f"{head}.") else before
            assert torch.equal(value, kept[name]), name
        assert message.startswith(f"{len(own) - 2} tensors loaded | new: {head}.weight ({new},")
        assert f"left out: {head}.weight ({old}," in message
        assert message.endswith("aux.weight (2,)")


def test_a_number_is_a_whole_number_in_the_beginning_of_a_name():
    model = model_of("small_net", 4)
    finetune.freeze(model, "0,1")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"0.weight", "1.weight", "1.bias"}
    finetune.train_mode(model, "1")
    norms = [module for module in model if isinstance(module, torch.nn.BatchNorm2d)]
    assert [norm.training for norm in norms] == [False] + 4 * [True]


def test_freezing_nothing_or_everything_is_refused():
    model = model_of("resnet18", 4)
    unknown = "--freeze stem: no weights have such names; expected the beginning of conv1, bn1"
    with pytest.raises(UserError, match=unknown):
        finetune.freeze(model, "stem")
    with pytest.raises(UserError, match="--freeze conv1,bn1,layer,fc: no weights are left to"):
        finetune.freeze(model, "conv1,bn1,layer,fc")


def test_a_part_of_a_model_is_trained_on_other_classes(train, one_each, tmp_path):
    """By two ranks, and resumed."""
    before = model_of("mobilenet_v3_small", 1000).state_dict()
    torch.save(before, tmp_path / "before.pt")
    flags = [one_each, "--epochs", 1, "--batch-size", 20, "--lr", 1, "--sync-bn", "--ema", 0.5]
    flags += ["--weights", tmp_path / "before.pt", "--new-head"]
    flags += ["--freeze", "features.0,features.1"]
    tuned = train("tuned", 2, *flags)
    assert tuned.wait() == [0, 0], tuned.output()
    assert "tensors loaded | new: classifier.3.weight (40, 1024)" in tuned.output()
    assert "left out: classifier.3.weight (1000, 1024)" in tuned.output()
    after = final(tmp_path / "tuned")["model"]
    shared = [name for name in before if not name.startswith("classifier.3.")]
    frozen = {name for name in shared if name.startswith(("features.0.", "features.1."))}
    changed = {name for name in shared if not torch.equal(before[name], after[name])}
    assert not frozen & changed and len(changed) > 0.5 * len(shared)
    assert any("running_mean" in name for name in changed)
    again = train("tuned", 2, *flags, "--resume", "--epochs", 2)
    assert again.wait() == [0, 0] and "tensors loaded" not in again.output(), again.output()
