"""What the checks of models and optimizers have in common of which each rank holds a part."""

from itertools import takewhile

import torch
from torch import nn

from exercises.judge.judging import classes, refuse, refuse_torchs_own, values, variable
from exercises.sentences import say


def first_gradients(rank):
    """Return the gradients that all optimizers of a rank get in the first training step."""
    found = []
    for event in rank.events:
        if event.kind == "before":
            found += event.value.gradients
        elif found and event.kind in ("batch", "backward"):
            break
    return [gradient for gradient in found if gradient is not None]


def norm(tensors):
    return sum(float(tensor.double().norm()) ** 2 for tensor in tensors) ** 0.5


def why_other_weights(ranks, expected):
    """Say that the first gradients are a sum, if so, however they are divided.

    Args:
        ranks: Records of ranks that hold parts.
        expected: the gradients of the whole model.
    """
    times = norm(g for rank in ranks for g in first_gradients(rank)) / norm(expected)
    if not abs(times - len(ranks)) < 0.01:  # or it is no number
        return ""
    return say(
        ". The gradients are {times:.3g} times as large, as a sum over the ranks is; expected the"
        " mean",
        times=times,
    )


# Models of which each rank trains a part

WIDTH = 256
INNER = 6  # layers of WIDTH to WIDTH weights
LAYERS = [(16, WIDTH), *[(WIDTH, WIDTH)] * INNER, (WIDTH, 4)]
WEIGHT = WIDTH * WIDTH * 4  # bytes of an inner layer
WEIGHTS = INNER * WEIGHT  # those of the others are not LARGE
WHOLE = sum(a * b * 4 for a, b in LAYERS)  # bytes of all layers


def plain_model():
    """Return the model of exercises 30 to 32 as torch would write it."""
    torch.manual_seed(0)
    layers = []
    for sizes in LAYERS:
        layers += [linear(*sizes), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def linear(inputs, outputs):
    """Return a layer that needs no other random numbers than the programs do."""
    layer = nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")
    nn.init.kaiming_uniform_(layer.weight)
    return layer


def train_whole(model, data):
    """Train a model as one process would, and return the gradients of the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = None
    for batch in data.split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), classes(batch)).backward()
        first = first or [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return first


def refuse_other_outputs(ranks, model, why=None):
    """Refuse outputs of the trained model that are not those of one process.

    Not bit for bit: the sum over a batch has another order if ranks share it.

    Args:
        ranks: Records.
        model: as one process has it before the training.
        why: why(ranks, gradients of the first step) gives a reason.
    """
    first = train_whole(model, ranks[0].data)
    expected = model(ranks[0].data).detach()
    for rank in ranks:
        outputs = variable(rank, "outputs")
        if not torch.allclose(outputs, expected, rtol=0, atol=1e-4):
            refuse(
                "With {count} ranks, the trained model of rank {rank} has other outputs than that"
                " of one process: the largest difference is {size:.2g}{reason}.",
                count=len(ranks),
                rank=rank.rank,
                size=float((outputs - expected).abs().max()),
                reason=(why or why_other_weights)(ranks, first),
            )


def refuse_forgotten_messages(rank):
    """Refuse a rank that does not wait for all of its messages."""
    missing = len(values(rank, "message")) - len(values(rank, "wait"))
    if missing > 0:
        refuse(
            "Rank {rank} does not wait for {missing} of its messages: a tensor may still be sent"
            " when it changes.",
            rank=rank.rank,
            missing=missing,
        )


def first_step(rank):
    """Return the events of a rank before its first training step."""
    return list(takewhile(lambda event: event.kind != "before", rank.events))


def computed(rank):
    """Return what a rank computed before its first training step: a list of Computed."""
    return [event.value for event in first_step(rank) if event.kind == "computed"]


def sent_in_first_step(rank, count):
    """Return the bytes that a rank sends in its first training step, with the best algorithms."""
    share = (count - 1) / count
    factors = {"all_reduce": 2 * share, "all_gather": count - 1, "reduce_scatter": share}
    factors |= {"all_to_all": share, "reduce": share, "recv": 0}
    events = [event for event in first_step(rank) if event.kind in ("batch", "message")]
    kinds = [event.kind for event in events]
    sent = [event.value for event in events[kinds.index("batch") :] if event.kind == "message"]
    return sum(factors.get(message.name, 1) * message.size for message in sent)


def refuse_whole_weights(ranks, ahead=1, holds_gradients=False):
    """Refuse ranks that hold more than their parts of the weights between two layers.

    Args:
        ranks: Records.
        ahead: gathered weights that are allowed.
        holds_gradients: whether the whole gradients are allowed.
    """
    count = len(ranks)
    for rank in ranks:
        refuse_torchs_own(rank)
        if not values(rank, "before"):
            refuse("I see no training step: expected a call of `optimizer.step()`.")
        given = sum(weight.nbytes for weight in values(rank, "before")[0].weights)
        if given > 1.1 * WHOLE / count:
            refuse(
                "With {count} ranks, rank {rank} gives {given:,} bytes of weights to the optimizer;"
                " its part of all weights is {part:,}.",
                count=count,
                rank=rank.rank,
                given=given,
                part=WHOLE // count,
            )
        relus = [one for one in computed(rank) if one.name == "relu"]
        too_much = []  # (what it holds, what it may hold)
        for k, one in enumerate(relus):
            complete = max(0, k - INNER - 1)  # inner layers whose gradient is complete
            gradients = complete * WEIGHT // (1 if holds_gradients else count)
            parts = WEIGHTS // count + gradients
            if one.held > parts + (ahead + 0.25) * WEIGHT:
                too_much.append((one, parts))
        if len(too_much) > 1:  # gloo may hold a tensor for a moment after the wait
            one, parts = too_much[1]
            refuse(
                "With {count} ranks, rank {rank} holds {held:,} bytes between two layers of the"
                " {backward} pass. Its parts of the weights{and_gradients} have {parts:,}: free"
                " everything else, also what autograd or a view keeps.",
                count=count,
                rank=rank.rank,
                held=one.held,
                backward=say("backward") if one.in_backward else say("forward"),
                and_gradients=say(" and of the gradients until here") if one.in_backward else "",
                parts=parts,
            )


def usually_held(rank, name):
    """Return the bytes that a rank holds at the relus or products of a forward pass: the median."""
    sizes = [one.held for one in computed(rank) if one.name == name and not one.in_backward]
    return sorted(sizes)[len(sizes) // 2]
