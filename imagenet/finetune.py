"""Fine-tuning: trained weights to start from, a new head for other classes, and frozen parts."""

import re

from torch import nn

from common.errors import UserError
from imagenet.weights import load_into, load_weights


def start_from(model, args, num_classes, is_main):
    """Load the weights of --weights into a model, on every rank.

    Args:
        args: reads weights, new_head and arch.
        num_classes: int, the outputs of the head.
        is_main: bool, whether this rank prints what a new head replaces.

    Raises:
        UserError: there are no such weights, or they do not fit.
    """
    weights = load_weights(args.weights)
    if args.new_head:
        weights, message = replace_head(model, weights, num_classes)
        if is_main:
            print(f"--weights {args.weights}: {message}")
    load_into(model, weights, args.weights)


def head_of(model, num_classes):
    """Return the name of a model's last layer that has one output per class."""
    names = []
    for name, module in model.named_modules():
        size = getattr(module, "out_features", getattr(module, "out_channels", None))
        if size == num_classes:
            names.append(name)
    return names[-1]


def replace_head(model, weights, num_classes):
    """Give weights the untrained head of a model. Return them and a message that says what changed.

    Weights that the model does not have, such as those of a second output for training, are left
    out.
    """
    own = model.state_dict()
    head = head_of(model, num_classes)
    new = {name: value for name, value in own.items() if name.startswith(f"{head}.")}
    loaded = {name: value for name, value in weights.items() if name in own and name not in new}
    left_out = [
        f"{name} {tuple(value.shape)}" for name, value in weights.items() if name not in loaded
    ]
    made = [f"{name} {tuple(value.shape)}" for name, value in new.items()]
    message = f"{len(loaded)} tensors loaded | new: {', '.join(made)} | "
    message += f"left out: {', '.join(left_out)}"
    return loaded | new, message


def prefixes_of(names):
    """Return the list of names that --freeze gives with commas between them."""
    return [name for name in names.split(",") if name]


def freeze(model, names):
    """Freeze the weights whose names begin with one of `names`: a str, as "conv1,bn1".

    DistributedDataParallel then does not send their gradients.

    Raises:
        UserError: a prefix matches nothing, or no weights are left to train.
    """
    parameters = dict(model.named_parameters())
    for prefix in prefixes_of(names):
        chosen = [name for name in parameters if begins_with(name, [prefix])]
        if not chosen:
            parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise UserError(
                f"--freeze {prefix}: no weights have such names; expected the beginning of {parts}"
            )
        for name in chosen:
            parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise UserError(f"--freeze {names}: no weights are left to train; freeze fewer parts")


def train_mode(model, names):
    """Set a model to training mode, but frozen batch norm to evaluation mode.

    The statistics of frozen batch norm then do not change. `names` are those of freeze().
    """
    model.train()
    prefixes = prefixes_of(names)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and begins_with(name, prefixes):
            module.eval()


def begins_with(name, prefixes):
    """Return whether a name begins with one of the prefixes.

    layer1.0.bn1 begins with layer and with layer1, but 17 does not begin with 1.
    """
    for prefix in prefixes:
        pattern = re.escape(prefix)
        if prefix[-1].isdigit():
            pattern += r"(?!\d)"
        if re.match(pattern, name):
            return True
    return False
