"""What the exercises say to their readers, in English. chinese.py has the same in Chinese."""

from typing import NamedTuple


class Text(NamedTuple):
    """The texts of an exercise."""

    title: str
    task: str  # what the program should do, and what one sees instead; its docstring
    hint: str
    page: tuple  # where to read: file in docs/, title of the section
    why: str  # what was wrong, for --solution


TEXTS = {
    1: Text(
        title="Sharing the images",
        task="""\
Train for one epoch on 256 images, with two processes that share the work.

The processes, called rank 0 and rank 1, run this same program. In an epoch, each image should be
read once, by one of the ranks. What you see: the loss falls, but the epoch has 8 training steps, as
many as with one process.""",
        hint="""\
Who tells a DataLoader which images to read? Here, nobody tells it that there are two ranks.""",
        page=("data-loading.md", "Who gets which image"),
        why="""\
A DataLoader does not know of other processes: with shuffle=True it reads the whole data set on
each rank. A DistributedSampler gives each rank its own part, and all ranks shuffle in the same
order.""",
    ),
    2: Text(
        title="The order of the images",
        task="""\
Train for three epochs on 256 images. Each epoch should have an order of its own.

Nothing fails. What you see: every epoch begins with the same five images, and in every epoch a
rank reads the images that it read before.""",
        hint="""\
A DistributedSampler shuffles by its seed and the number of the epoch. Who counts the epochs?""",
        page=("data-loading.md", "Why set_epoch"),
        why="""\
A DistributedSampler shuffles with the seed plus the number of the epoch, so that all ranks shuffle
alike. It cannot count epochs itself: sampler.set_epoch(epoch) tells it the number.""",
    ),
    3: Text(
        title="The model under DDP",
        task="""\
Train one model with DistributedDataParallel (DDP) on two ranks.

The ranks should have the same weights after every training step.

Nothing fails, and the loss falls. What you see: the ranks print different first weights.""",
        hint="""\
DDP prepares the average of the gradients in its forward pass. Is that forward pass called?""",
        page=("03_mnmc_ddp_launch.md", "The wrap"),
        why="""\
The program called the model itself, not the DDP object around it. Then DDP does not average the
gradients, and each rank trains a model of its own. Train ddp; evaluate and save model.""",
    ),
    4: Text(
        title="The number of the GPU",
        task="""\
Choose a GPU. Each process should have a GPU of its own on its machine.

Two machines have two GPUs each, and torchrun starts four processes: ranks 0 and 1 on the first
machine, 2 and 3 on the second. You need no GPU: the program only names the device. On real GPUs,
ranks 2 and 3 would fail with "invalid device ordinal".""",
        hint="""\
GPUs are counted on each machine from 0. Which number of a process is counted like this?""",
        page=("concepts.md", "What are rank, local rank, node rank and world size?"),
        why="""\
The rank counts processes on all machines, GPUs are counted on one machine. torchrun sets
LOCAL_RANK, the number of the process on its machine.""",
    ),
    5: Text(
        title="Counting correct answers",
        task="""\
Evaluate a model on 100 images, half of them on each rank.

Rank 0 should print the number of correct answers of both ranks.

What you see: nothing is printed, and the program never ends.""",
        hint="""\
A collective is complete when all ranks have called it. Which ranks call all_reduce?""",
        page=("concepts.md", "Collectives"),
        why="""\
Only rank 0 called all_reduce. It waited there for rank 1, which waited for it in the barrier. A
collective belongs outside of `if rank == 0`; only printing and saving belong inside.""",
    ),
    6: Text(
        title="Evaluating 101 images",
        task="""\
Evaluate a model on 101 images, about half of them on each rank. Each image should count once.

What you see: the program counts 102 answers.""",
        hint="""\
101 images cannot be divided by two. What does a DistributedSampler do with the rest?""",
        page=("data-loading.md", "Exact evaluation"),
        why="""\
A DistributedSampler makes the parts equal: it repeats images, or drops some with drop_last=True.
Training needs equal parts, an evaluation does not: give each rank every second image.""",
    ),
    7: Text(
        title="The mean loss",
        task="""\
Evaluate a model on 100 images: 70 on rank 0, 30 on rank 1.

Print the mean loss of the 100 images.

Nothing fails. What you see: a number, but not the mean loss of the 100 images.""",
        hint="""\
Is each image as important as every other? The batches and the ranks have different sizes.""",
        page=("data-loading.md", "Exact evaluation"),
        why="""\
A mean of means is right only if all parts have the same size. Here the last batches are smaller,
and so is the part of rank 1. Sum the losses and the images, over batches and ranks, and divide
once.""",
    ),
    8: Text(
        title="The global batch size",
        task="""\
Train with 96 images per training step and learning rate 0.5, on any number of processes.

One process alone takes 8 steps per epoch. What you see: two processes take 4, with 192 images
each. check.py starts the program with two and with three processes.""",
        hint="""\
batch_size of a DataLoader counts the images of one process. How many images
of a batch of 96 are that?""",
        page=("concepts.md", "Is the batch size per GPU, and must the learning rate scale?"),
        why="""\
The batch size of a DataLoader is per process, so the global batch size was 96 times the number of
processes. If the global batch size stays, the learning rate stays too.""",
    ),
    9: Text(
        title="Random flips",
        task="""\
Flip each image at random.

The ranks should flip independently, and a second run should flip as the first did.

Nothing fails. What you see: both ranks print the same first flips.""",
        hint="""\
Random numbers follow from the seed. The model must begin equal on all ranks; and the flips?""",
        page=("data-loading.md", "Random augmentation"),
        why="""\
All ranks had the same seed, so they drew the same random numbers. Set a seed that contains the
rank, after the model and the data are built. The model needs the same numbers on all ranks, the
augmentation others.""",
    ),
    10: Text(
        title="Batch norm in the evaluation",
        task="""\
Train a model with batch norm, then evaluate it on 256 images, half of them on each rank.

Both ranks should evaluate the same model.

Nothing fails. What you see: the ranks print different running means.""",
        hint="""\
Gradients are averaged. Batch norm also has running statistics, from the images of its rank.""",
        page=("syncbn.md", "Running statistics and the evaluation"),
        why="""\
DDP copies the running statistics of rank 0 to all ranks before each forward pass, so the last
training step leaves different ones. Copy them once more before the evaluation.""",
    ),
    11: Text(
        title="One checkpoint file",
        task="""\
Save the weights once, in one file, so that a program without DDP can load them on every rank.

What you see: loading fails, because keys are missing. And once that is mended, look who writes.""",
        hint="""\
Print the keys of ddp.state_dict(). Then: which rank writes, and how do the others know when?""",
        page=("03_mnmc_ddp_launch.md", "Saving and exit"),
        why="""\
The state of a DDP object has keys that begin with "module.": save the model inside. One rank
writes; if several write one file, it may be damaged. A barrier lets the others read only what is
complete.""",
    ),
    12: Text(
        title="Different numbers of batches",
        task="""\
Train for an epoch.

Rank 0 reads 90 images, rank 1 reads 60 others, in batches of 16. The program should end; some
images may be left out.

What you see: both ranks print four lines, although rank 0 has six batches, and the program never
ends.""",
        hint="""\
In each training step, the ranks average their gradients. How many steps does each rank take?""",
        page=("data-loading.md", "Uneven shares"),
        why="""\
Rank 0 had six batches, rank 1 four. In the fifth step, rank 0 waited for gradients of a rank that
had left the loop. All ranks must take the same number of steps: agree on the smallest.""",
    ),
    13: Text(
        title="Gradient accumulation",
        task="""\
Accumulate the gradients of four batches for each training step.

The ranks should exchange gradients once per training step.

The result is right. What check.py sees: four messages per training step.""",
        hint="""\
Only the last of the four backward passes needs the other rank. DDP has a context manager for the
others.""",
        page=("performance.md", "What makes a step faster"),
        why="""\
DDP averages gradients in every backward pass. The usual mend: all but the last batch run inside
`with ddp.no_sync():`, with their forward pass, and DDP only adds up their gradients. One backward
pass for the sum of the losses also sends once, but keeps the activations of all batches.""",
    ),
    14: Text(
        title="Gradient clipping",
        task="""\
Average the gradients by hand, clip their norm to 0.6, and train.

Two ranks should train as one process does with the images of both.

Nothing fails. What you see: the ranks print different norms.""",
        hint="""\
One process clips the gradient of the whole batch. When does a rank know this gradient?""",
        page=("concepts.md", "Are gradients summed or averaged?"),
        why="""\
Each rank clipped the gradient of its own images, and then they averaged what was left. The mean of
clipped gradients is not the clipped mean. First average, then clip.""",
    ),
    15: Text(
        title="Dropout",
        task="""\
Train with dropout for two epochs.

Each rank should drop other activations, each epoch too, and a second run should drop the same as
the first.

Nothing fails. What check.py sees: in each training step, all ranks drop the same activations.""",
        hint="""\
The seed follows from the epoch, so that it can be set again after a restart. What is missing?""",
        page=("data-loading.md", "Random augmentation"),
        why="""\
torch.manual_seed(epoch) set the same seed on all ranks. A seed made of epoch and rank can be set
again as well, if no two pairs give the same number: 1000 * epoch + rank, not epoch + rank.""",
    ),
    16: Text(
        title="Resuming an epoch",
        task="""\
Train for an epoch of 8 steps.

The job is killed after step 3 and continues from its checkpoint. In the epoch, each image should
be read once for a training step.

Nothing fails. What check.py sees: some images are trained twice, others never.""",
        hint="""\
After the restart, model and step are those of the checkpoint. Where does the DataLoader begin?""",
        page=(
            "elastic.md",
            "Who saves, what goes into a checkpoint, and what happens after a failure?",
        ),
        why="""\
The second part of the training began with the first image of the epoch. The position in the epoch
belongs to the state: skip as many batches as there were steps.""",
    ),
    17: Text(
        title="Stopping on a signal",
        task="""\
Stop cleanly when the cluster sends a signal to one process.

All ranks should stop after the same step, soon after the signal. check.py runs the program three
times: with a signal for rank 1, with one for rank 0, and without a signal.

What you see: rank 1 stops after step 5, rank 0 does not, and the program never ends.""",
        hint="""\
Only one rank knows of the signal. How do all learn of it, before any of them leaves the loop?""",
        page=("elastic.md", "How all ranks stop at the same step"),
        why="""\
A rank left the loop alone, and the other one waited for its gradients. Ranks must decide together:
all_reduce with MAX says whether anyone has a signal. It costs one small message per step.""",
    ),
    18: Text(
        title="A damaged image",
        task="""\
Train on images of which one is damaged.

The ranks must not wait for each other forever: either all of them end, and at least one says why
with an error, or all of them train on, with equal weights.

What you see: rank 1 skips a batch, rank 0 does not, and the program never ends.""",
        hint="""\
What the except clause skips has a collective in it. Who waits in the collective?""",
        page=("hangs.md", "Seven hangs"),
        why="""\
One rank skipped a training step that the other took, and so was one collective behind until the
end. Let the error end the program: torchrun stops the other ranks. Or let all ranks skip it.""",
    ),
    19: Text(
        title="DDP by hand 1: average the gradients",
        task="""\
Write what DistributedDataParallel does, in the simplest way.

All ranks should begin with the weights of rank 0, and after the backward pass each gradient should
be the mean over all ranks. The weights should then be those of torch's DDP, bit for bit.

Nothing fails. What check.py sees: the ranks begin with different weights, and each trains a model
of its own.""",
        hint="""\
torch.distributed has a collective that copies a tensor from one rank to all, and one that sums a
tensor over all ranks. Both change the tensor in place.""",
        page=("concepts.md", "Are gradients summed or averaged?"),
        why="""\
One broadcast per parameter at the beginning, and one all_reduce per gradient and training step. If
torch warned about autograd, broadcast parameter.data instead of the parameter.""",
    ),
    20: Text(
        title="DDP by hand 2: while the backward pass runs",
        task="""\
Send each gradient as soon as it is complete, while the backward pass computes the next ones.

A hook on each parameter (register_post_accumulate_grad_hook) should start an all_reduce that does
not wait (async_op=True). finish_gradients() should wait for all of them. The weights should be
those of torch's DDP.

Nothing fails. What check.py sees: the ranks begin equal, but each trains a model of its own.""",
        hint="""\
parameter.register_post_accumulate_grad_hook(function) calls function(parameter) when its gradient
is complete. dist.all_reduce(..., async_op=True) returns a work, which has wait().""",
        page=("concepts.md", "How DDP hides the all-reduce behind the backward pass"),
        why="""\
A hook starts the all_reduce of its gradient and keeps the work. Before the optimizer uses the
gradients, finish_gradients() waits for all works.""",
    ),
    21: Text(
        title="DDP by hand 3: in buckets",
        task="""\
Send gradients in buckets of about 40 kB, while the backward pass runs.

A message has a fixed cost, so many small messages are slow. The model has 16 parameters; expect
three or four messages per training step. The weights should be those of torch's DDP.

Nothing fails. What check.py sees: the ranks begin equal, but each trains a model of its own.""",
        hint="""\
The backward pass completes the gradients of the last layers first: fill buckets from the end. When
all gradients of a bucket are complete, send torch.cat of them; afterwards copy the parts back.""",
        page=("concepts.md", "How DDP hides the all-reduce behind the backward pass"),
        why="""\
The parameters are put in buckets from the last to the first. A hook counts the complete gradients
of its bucket; the last one sends them as one flat tensor. finish_gradients() copies them back.""",
    ),
    22: Text(
        title="A sharded optimizer: ZeRO stage 1",
        task="""\
Divide the state of the optimizer: each rank keeps the momentum of about half of the weights.

A rank should update only its own parameters, with torch's SGD, and get the others from the rank
that updated them. The weights should be those of an ordinary SGD with momentum, bit for bit.
Gradients are averaged by DDP as usual.

The result is right. What check.py sees: every rank keeps all of the momentum.""",
        hint="""\
Give torch's SGD only the parameters of this rank, for example the first half of them. After its
step, the rank that updated a parameter broadcasts it.""",
        page=("concepts.md", "What can be cut up"),
        why="""\
Each rank has an SGD for about half of the parameters, and so half of the momentum. After the step,
each parameter is broadcast by the rank that updated it. Every second parameter would not do: then
one rank has all matrices, the other all biases.""",
    ),
}
