"""The optimizer of 06 and its learning rate."""

import math

import torch


def build_optimizer(model, args, device):
    """Return SGD with Nesterov momentum. train_epoch() sets its learning rate in every step."""
    groups = parameter_groups(model, args.weight_decay)
    nesterov = args.momentum > 0
    fused = device.type != "cpu"  # one kernel for all weights
    return torch.optim.SGD(groups, lr=0, momentum=args.momentum, nesterov=nesterov, fused=fused)


def parameter_groups(model, weight_decay):
    """Return two groups: weights, which decay; norms and biases, which it would not help."""
    trained = [p for p in model.parameters() if p.requires_grad]  # not those of --freeze
    weights = [p for p in trained if p.ndim > 1]
    norms_and_biases = [p for p in trained if p.ndim <= 1]
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": norms_and_biases, "weight_decay": 0.0},
    ]


def start_momentum(optimizer):
    """Give every weight its momentum, zero at first, in the memory format of the weight.

    A fused SGD allocates it in the first step, and writes nothing after an overflow in fp16: what
    was in this memory would be the momentum. And it refuses a momentum in another memory format, as
    in a checkpoint from before --channels-last.
    """
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] else []:
            momentum = torch.zeros_like(weight)
            saved = optimizer.state[weight].get("momentum_buffer")
            if saved is not None:
                momentum.copy_(saved)
            optimizer.state[weight]["momentum_buffer"] = momentum


def learning_rate(args, epoch):
    """Return the learning rate at an epoch, where 2.5 is halfway through the third.

    Linear scaling and warm-up: Goyal et al., "Accurate, Large Minibatch SGD", 2017. Cosine:
    Loshchilov and Hutter, "SGDR", 2016, without restarts; multiplied by the warm-up, as in pycls.
    """
    lr = args.lr * args.batch_size / 256
    if args.schedule == "cosine":
        share = (1 + math.cos(math.pi * epoch / args.epochs)) / 2
        lr *= args.final_lr + (1 - args.final_lr) * share
    else:
        lr = lr * 0.1 ** (epoch // args.step_epochs)
    if epoch < args.warmup_epochs:
        lr *= args.warmup_factor + (1 - args.warmup_factor) * epoch / args.warmup_epochs
    return lr
