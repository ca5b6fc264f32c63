"""A loss that was averaged over the ranks before its backward pass, and gathered tensors."""

import sys

from rank_watch.compare import COPY
from rank_watch.hooks import replace
from rank_watch.places import own_line

torch = sys.modules.get("torch")
MARK = "check_ranks"
NODES = 50  # of the graph above a loss: more are not searched


def install(recorder):
    dist = torch.distributed
    reduced = []  # lines at which tensors with a gradient were reduced

    def all_reduce(real, tensor, *args, **kwargs):
        if torch.is_grad_enabled() and tensor.grad_fn:
            reduced.append(own_line())
            tensor.grad_fn.metadata[MARK] = reduced[-1]  # of the node, which lives with its graph
        return real(tensor, *args, **kwargs)

    def all_gather(real, into, tensor, *args, **kwargs):
        if torch.is_grad_enabled() and tensor.requires_grad:
            recorder.add("gathered", line=own_line())
        return real(into, tensor, *args, **kwargs)

    def backward(real, tensors, *args, **kwargs):
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            for line, factor in reduced_in(tensor) if reduced else ():
                recorder.add("reduced loss", line=line, factor=factor)
        return real(tensors, *args, **kwargs)

    for owner in (dist, dist.distributed_c10d):
        replace(owner, "all_reduce", all_reduce)
        replace(owner, "all_gather", all_gather)
        replace(owner, "all_gather_into_tensor", all_gather)
    replace(torch.autograd, "backward", backward)


def reduced_in(loss):
    """Yield (line, factor) for each reduced tensor that the loss is a multiple of."""
    nodes = [(loss.grad_fn, 1.0)]
    for node, factor in nodes:
        if node and MARK in node.metadata:
            yield node.metadata[MARK], factor
        other = getattr(node, "_saved_other", None)
        if isinstance(other, torch.Tensor) and other.numel() == 1:
            kind = type(node).__name__
            if kind == "DivBackward0":
                factor /= float(other) or 1
            elif kind == "MulBackward0":
                factor *= float(other)
        if node and len(nodes) < NODES:
            nodes += [(next_node, factor) for next_node, _ in node.next_functions]


def judge(runs, judgment):
    world_size = len(runs)
    for event in runs[0].noted["reduced loss"]:
        if abs(event["factor"] * world_size - 1) < 1e-3:
            judgment.found.append(
                f"the loss was averaged over the ranks at {event['line']}, before its backward "
                f"pass: no gradient goes through all_reduce, so the gradient is that of this "
                f"rank's loss / {world_size}, and DistributedDataParallel divides once more. "
                f"Average a detached copy, for printing only ({COPY})"
            )
            break
    if gathered := runs[0].noted["gathered"]:
        judgment.notes.append(
            f"all_gather at {gathered[0]['line']} got a tensor with a gradient, and no gradient "
            "goes through it: right for a metric; for a loss over all ranks, call "
            "torch.distributed.nn.functional.all_gather"
        )
