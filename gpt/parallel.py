"""What tensor parallelism needs beside torch's own styles."""

import warnings

from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

# The logits are a view of what the ranks have gathered. 08 does not change them in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


class Replicated(ParallelStyle):
    """A module that each rank of the mesh holds whole, for parallelize_module.

    Its weights become DTensors, as those that are cut: clip_grad_norm_ refuses tensors of both
    kinds, or of two meshes.
    """

    def _apply(self, module, mesh):
        return distribute_module(module, mesh, None, to_dtensors, to_local)


def to_dtensors(module, inputs, mesh):
    """Return the inputs of a module, which are equal on all ranks, as DTensors."""
    return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)


def to_local(module, output, mesh):
    return output.to_local()
