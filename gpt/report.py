"""What 08 prints and records: tokens, bits per byte, and how much of the device it uses."""

import math
import textwrap

import torch.distributed as dist

from common.records import append_record
from common.report import Report
from ddp.report import launch_fields, launch_lines, launcher_name
from gpt.text import VOCABULARY

# bfloat16 TFLOP/s without sparsity, from NVIDIA's data sheets; the first name that fits counts.
PEAKS = {
    "A100": 312,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200 NVL": 835,
    "H200": 989,
    "B200": 2250,
    "L40S": 362,
}


class TextReport(Report):
    """The console lines and the records of one run. Only rank 0 prints and writes.

    Args:
        args: the flags of 08.
        device: torch.device, of this rank.
        local_world_size: int, the processes on this machine.
    """

    recorded = ("text", "epochs", "layers", "heads", "width", "context", "accumulate")
    recorded += ("data", "tensor", "lr", "warmup_steps", "weight_decay", "clip_grad", "seed")

    def __init__(self, args, device, local_world_size):
        ranks = dist.get_world_size()
        fields = launch_fields(device, launcher_name(), ranks, local_world_size)
        fields |= {"batch_size": args.batch_size // args.data, "amp": args.amp}
        super().__init__(args, device, fields, is_main=dist.get_rank() == 0)
        self.ranks = ranks
        self.world_size = args.data  # the ranks that read windows of their own
        self.test_bits = None  # per byte, after the last epoch
        self.flops = None  # per token
        self.peak = peak_of(self.record["device_name"])

    def header(self, model, train_set, test_set):
        """Print what decides the cost and the result of a run. A collective."""
        args = self.args
        for line in launch_lines(self.record, self.device):
            self.print(line)
        weights = sum(p.numel() for p in model.parameters())
        self.flops = flops_per_token(args, model)
        self.print(
            f"text: {train_set.count} bytes to train on and {test_set.count} to test on, in "
            f"windows of {args.context}"
        )
        self.print(f"{describe_sizes(args)}, {weights / 1e6:.2f} M weights | seed {args.seed}")
        self.print(
            f"mesh: data {args.data} x tensor {args.tensor} | global batch = "
            f"{args.batch_size // args.data // args.accumulate} windows x {args.accumulate} "
            f"micro-batches x {args.data} = {args.batch_tokens} tokens | lr {args.lr:g}"
        )
        data, tensor = (sent / 1e6 for sent in bytes_sent(args, weights))
        self.print(
            f"each rank sends per step {data:.1f} MB along data, {tensor:.1f} MB along tensor"
        )

    def speed(self, since):
        """Return tokens per second since a Mark, and the share of the peak that they need."""
        tokens = self.epoch.speed(since) * self.args.context
        text = f"{tokens:.0f} tok/s"
        if self.peak:
            text += f" | MFU {tokens * self.flops / self.ranks / self.peak / 1e12:.1%}"
        return tokens, text

    def show_step(self, step, totals, lr):
        """Print the loss since the start of the epoch, and the speed since the last line.

        Args:
            step: int, counted from 0.
            totals: float (2,) on the device: sum of losses and targets since the last line, of all
                ranks.
            lr: float, the learning rate of the next step.
        """
        epoch = self.epoch
        since = max(epoch.line, epoch.warm)
        epoch.end_line([*totals.tolist(), 0])  # note: this waits for the device
        loss = epoch.totals[0] / epoch.totals[1]
        self.print(
            f"   == step: [{step + 1:3}/{epoch.steps}] [{epoch.number + 1}/{self.args.epochs}] | "
            f"loss: {loss:.3f} | lr: {lr:.2e} | {self.speed(since)[1]}"
        )

    def show_epoch(self, totals):
        """Print the loss on the test text, and write the record of an epoch.

        Args:
            totals: see show_step, of the test text.
        """
        epoch = self.epoch
        loss = (totals[0] / totals[1]).item()
        self.test_bits = loss / math.log(2)  # a token is a byte
        tokens, speed = self.speed(epoch.warm)
        self.print(
            f"   == test: [{epoch.number + 1}/{self.args.epochs}] | loss: {loss:.3f} | "
            f"{self.test_bits:.3f} bits per byte | {epoch.seconds:.1f} s, {speed}"
        )
        if self.args.log_file and self.console.is_main:
            trained = {
                "epoch": epoch.number + 1,
                "seconds": round(epoch.seconds, 3),
                "tokens_per_second": round(tokens, 1),
                "train_loss": round(epoch.totals[0] / epoch.totals[1], 4),
                "test_loss": round(loss, 4),
            }
            append_record(self.args.log_file, self.record | trained)

    def show_sample(self, text):
        """Print bytes, indented, since they may look like lines of a report or a page."""
        self.print(textwrap.indent(text.decode(errors="replace"), "    "))

    def result(self):
        """Return what summary() says of the training."""
        bits = self.test_bits
        return "nothing trained" if bits is None else f"{bits:.3f} bits per byte of the test text"


def peak_of(device_name):
    """Return the bfloat16 TFLOP/s of a device, or None if they are not known here."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


def describe_sizes(args):
    """Return the sizes of the model as text."""
    return ", ".join(f"{name} {size}" for name, size in args.sizes.items())


def flops_per_token(args, model):
    """Return the operations that a model needs per token (PaLM, arXiv:2204.02311, appendix B).

    6 per weight of a matrix, for the forward pass and the backward pass, and those of attention.
    The embeddings are looked up, so they do not count.
    """
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    matrices -= (VOCABULARY + args.context) * args.width
    return 6 * matrices + 12 * args.layers * args.width * args.context


def bytes_sent(args, weights):
    """Return the bytes that a rank sends per training step along data, and along tensor.

    An all-reduce of n bytes between k ranks makes each send 2 (k - 1) / k n, a gather or a
    reduce-scatter half of it. FSDP gathers the weights of a rank twice per micro-batch, and reduces
    their gradients once. Tensor parallelism reduces the activations twice per block and direction,
    after the embedding, and before the head in the backward pass; and it gathers the logits.
    """
    size = 2 if args.amp == "bf16" else 4
    share = weights / args.tensor
    gathers = args.accumulate * 2 * size * share
    data = (args.data - 1) / args.data * (gathers + 4 * share)
    tokens = args.batch_tokens / args.data
    reduced = (4 * args.layers + 2) * 2 * args.width + VOCABULARY
    tensor = (args.tensor - 1) / args.tensor * tokens * reduced * size
    return data, tensor
