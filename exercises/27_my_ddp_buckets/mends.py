"""Mends of exercise 27, right and wrong."""

ONE = "        # 1. Here: divide the parameters into buckets.\n"
TWO = "        # 2. Here.\n"

FILL = """\
        self.buckets = [[]]
        for parameter in model.parameters():
            if sum(p.nbytes for p in self.buckets[-1]) >= BUCKET_SIZE:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
"""
AVERAGE = """\
        for bucket in self.buckets:
            gradients = [p.grad for p in bucket if p.grad is not None]
            flat = nn.utils.parameters_to_vector(gradients) / dist.get_world_size()
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat, gradients)
"""
ONE_TENSOR = """\
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        for piece in flat.split(BUCKET_SIZE // flat.element_size()):
            dist.all_reduce(piece)
        flat /= dist.get_world_size()
        for gradient in gradients:
            gradient.copy_(flat[: gradient.numel()].view_as(gradient))
            flat = flat[gradient.numel() :]
"""

RIGHT = {"pieces of one tensor": [(TWO, ONE_TENSOR)]}

WRONG = {
    "numbers in place of bytes": (
        [(ONE, FILL.replace("nbytes", "numel()")), (TWO, AVERAGE)],
        "1 messages per training step; expected three or four",
    ),
    "no frozen or unused parameter": (
        [(ONE, FILL), (TWO, AVERAGE.replace(" if p.grad is not None", ""))],
        "failed, in the run with WORLD_SIZE=3, ODD_MODEL=1",
    ),
    "nothing is copied back": (
        [(ONE, FILL), (TWO, AVERAGE.replace("(flat, gradients)", "(flat.clone(), [])"))],
        "the optimizer of rank 0 gets the gradients of its own images",
    ),
}
