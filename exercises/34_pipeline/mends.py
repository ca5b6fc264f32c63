"""Mends of exercise 34, right and wrong."""

RANK_0 = """\
    outputs = model(batch)
    dist.send(outputs.detach(), 1)
    gradient = torch.empty_like(outputs)
    dist.recv(gradient, 1)
    outputs.backward(gradient)
"""
RANK_1 = """\
    inputs = torch.empty(len(labels), 64)
    dist.recv(inputs, 0)
    inputs.requires_grad_()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    dist.send(inputs.grad, 0)
"""

# All receives are posted at the beginning
AHEAD = """\
    parts = batch.chunk(MICRO_BATCHES)
    gradients = [torch.empty(len(part), 64) for part in parts]
    receives = [dist.irecv(gradient, 1) for gradient in gradients]
    held = [model(parts[0])]
    dist.send(held[0].detach(), 1)
    for part, gradient, work in zip([*parts[1:], None], gradients, receives, strict=True):
        if part is not None:
            held.append(model(part))
            dist.send(held[-1].detach(), 1)
        work.wait()
        held.pop(0).backward(gradient)
"""
FIRST_ALL = """\
    held = [model(part) for part in batch.chunk(MICRO_BATCHES)]
    works = [dist.isend(outputs.detach(), 1) for outputs in held]
    for outputs, work in zip(held, works, strict=True):
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, 1)
        outputs.backward(gradient)
        work.wait()
"""
PARTS = """\
    for part in labels.chunk(MICRO_BATCHES):
        inputs = torch.empty(len(part), 64)
        dist.recv(inputs, 0)
        inputs.requires_grad_()
        loss = nn.functional.cross_entropy(model(inputs), part) / MICRO_BATCHES
        loss.backward()
        dist.send(inputs.grad, 0)
"""

RIGHT = {"all receives posted at the beginning": [(RANK_0, AHEAD), (RANK_1, PARTS)]}

WRONG = {
    "all forward passes first": (
        [(RANK_0, FIRST_ALL), (RANK_1, PARTS)],
        "Rank 0 holds the activations of 3 micro-batches",
    ),
    "losses that are not divided": (
        [(RANK_0, AHEAD), (RANK_1, PARTS.replace(" / MICRO_BATCHES", ""))],
        "The weights are not those of one process",
    ),
}
