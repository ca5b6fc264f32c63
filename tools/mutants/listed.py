"""Break the code on purpose, one promise at a time, and see that the tests notice.

    python tools/mutants/listed.py                  all mutants, in copies of the repository
    python tools/mutants/listed.py data.py 06       those whose file contains one of these texts
    python tools/mutants/listed.py --list

Each mutant names the promise that it breaks and the tests that must fail. A mutant that survives is
a test to write. tools/mutants/sample.py makes random faults, which nobody has listed.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.errors import UserError, one_line_errors
from common.flags import Parser, whole_number
from tools.mutants import trial

PATIENCE = 600  # seconds until a test that hangs counts as failed


class Mutant(NamedTuple):
    """A change of one place in a file, what it breaks, and the tests that notice: arguments of pytest."""

    file: str
    before: str
    after: str
    breaks: str
    tests: str


def mutants(file, *changes):
    """Return the Mutants of a file, given (before, after, breaks, tests) for each."""
    return [Mutant(file, *change) for change in changes]


# fmt: off
MUTANTS = [
    *mutants("01_snsc.py",
        ("            optimizer.zero_grad()\n", "", "gradients of one step only", "tests/test_scripts.py -k first_run"),
        ("            scheduler.step()\n", "", "the rate warms up", "tests/test_scripts.py -k climbs"),
        ("nesterov=True", "nesterov=False", "the optimizer of the published runs",
         "tests/test_scripts.py -k plain_pytorch"),
        ("        model.eval()\n", "", "evaluation does not train", "tests/test_scripts.py -k plain_pytorch"),
        ("totals += batch_totals", "totals = batch_totals", "means over the epoch",
         "tests/test_scripts.py -k plain_pytorch"),
    ),
    *mutants("02_snmc_dp.py",
        ("normalize(images)", "augment(images)", "test images are as they are",
         "tests/test_scripts.py -k dataparallel"),
        ("train_sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(args.seed))",
         "train_sampler = range(len(train_set))", "another order in each epoch", "tests/test_scripts.py -k order"),
    ),
    *mutants("03_mnmc_ddp_launch.py",
        ("        train_sampler.set_epoch(epoch)", "        epoch", "another order in each epoch",
         "tests/test_scripts.py -k order"),
        ("ddp = DistributedDataParallel(model)", "ddp = model", "ranks share gradients",
         "tests/test_ladder.py -k torchrun-2"),
        ("        dist.all_reduce(correct)\n", "", "accuracy of all ranks", "tests/test_ladder.py -k 1003"),
        ("range(rank, len(test_set), world_size)", "range(len(test_set))", "test images count once",
         "tests/test_ladder.py -k 1003"),
        ("                dist.all_reduce(totals)  # the sum over all ranks\n", "", "printed loss of all ranks",
         "tests/test_ladder.py -k torchrun-2"),
        ("(args.seed + 1) + rank)", "(args.seed + 1))", "each rank augments in its own way",
         "tests/test_launch.py -k crops_and_mirrors"),
        ("args.batch_size * world_size / 256", "args.batch_size / 256", "the rate grows with the world",
         "tests/test_ladder.py -k torchrun-2"),
        ("            dist.broadcast(buffer, src=0)", "            pass", "all ranks evaluate one model",
         "tests/test_ladder.py -k resnet18_without"),
        ("backend, timeout=TIMEOUT, device_id", "backend, device_id", "a peer that stops ends 03",
         "tests/test_timeouts.py -k 03_to_05"),
    ),
    *mutants("04_mnmc_ddp_mp.py",
        ("args.node_rank * args.nproc_per_node + local_rank", "local_rank", "ranks count all machines",
         "tests/test_launch.py -k two_hosts"),
        ("        dist.all_reduce(correct)\n", "", "accuracy of all ranks", "tests/test_ladder.py -k mp.spawn-2"),
        (', "timeout": TIMEOUT}', "}", "a peer that stops ends 04",
         "tests/test_timeouts.py -k 03_to_05"),
    ),
    *mutants("05_mnmc_ddp_slurm.py",
        ('os.environ["SLURM_PROCID"]', 'os.environ["SLURM_LOCALID"]', "ranks count all machines",
         "tests/test_slurm.py -k starts_05"),
        ("        dist.all_reduce(correct)\n", "", "accuracy of all ranks", "tests/test_ladder.py -k srun-2"),
        (', "timeout": TIMEOUT}', "}", "a peer that stops ends 05",
         "tests/test_timeouts.py -k 03_to_05"),
    ),
    *mutants("06_imagenet.py",
        ('        for group in optimizer.param_groups:\n            group["lr"] = lr\n',
         '        optimizer.param_groups[0]["lr"] = lr\n', "norms and biases learn",
         "tests/test_imagenet.py -k plain_pytorch"),
        ("accuracy[0] > run.best", "accuracy[0] < run.best", "best.pt is the best",
         "tests/test_imagenet.py -k test_best"),
        ("            nn.utils.clip_grad_norm_(run.model.parameters(), args.clip_grad)\n", "            pass\n",
         "--clip-grad", "tests/test_imagenet.py -k plain_pytorch"),
        ("label_smoothing=args.label_smoothing", "label_smoothing=0.0", "--label-smoothing",
         "tests/test_imagenet.py -k plain_pytorch"),
        ("nesterov = args.momentum > 0", "nesterov = False", "Nesterov momentum",
         "tests/test_imagenet.py -k plain_pytorch"),
        ("        if self.d.is_main:\n            self.totals += ", "        if True:\n            self.totals += ",
         "a resumed epoch counts its images once", "tests/test_imagenet.py -k counts_of"),
        ("dropout_seed(args.seed, epoch, step, micro, d.rank)",
         "dropout_seed(args.seed, epoch, step, micro)",
         "ranks drop other neurons", "tests/test_imagenet.py -k dropout_differs"),
        ("dropout_seed(args.seed, epoch, step, micro, d.rank)",
         "dropout_seed(args.seed, epoch, step, d.rank)",
         "micro-batches drop other neurons", "tests/test_imagenet.py -k dropout_differs"),
        ("else run.ddp.no_sync()", "else contextlib.nullcontext()", "one exchange per step",
         "tests/test_imagenet.py -k exchange_gradients"),
        ("weight = d.world_size / run.batches.step_size(step)", "weight = 1 / run.batches.step_size(step)",
         "the mean over all ranks", "tests/test_imagenet.py -k unevenly"),
        ("run.ema.update(first=run.step == 0)", "run.ema.update(first=False)",
         "averaging starts from the first weights", "tests/test_imagenet.py -k first_step_begins"),
        ("*(self.ema.module.buffers() if self.ema else [])", "", "one average for all ranks",
         "tests/test_imagenet.py -k same_state"),
        ("            dist.broadcast(buffer, src=0)", "            pass", "one state for all ranks",
         "tests/test_imagenet.py -k same_state"),
        ("        if len(images):  # with more ranks", "        if True:  # with more ranks",
         "more ranks than test images", "tests/test_imagenet.py -k without_a_test_image"),
        ("return args.eval_every > 0 and (last or (epoch + 1) % args.eval_every == 0)", "return args.eval_every > 0",
         "--eval-every", "tests/test_imagenet.py -k eval_every"),
        ("lr * 0.1 ** (epoch // args.step_epochs)", "lr * 0.1 ** (epoch / args.step_epochs)", "--schedule step",
         "tests/test_imagenet.py -k rate_warms"),
        ("args.warmup_factor + (1 - args.warmup_factor) *", "", "--warmup-factor",
         "tests/test_imagenet.py -k rate_warms"),
        ("model = run.ema.module if run.ema else run.model", "model = run.model", "--ema is what is evaluated",
         "tests/test_imagenet.py -k averaged_weights_are"),
        ("checkpoints.save(run.state_dict(), BEST)",
         'checkpoints.save(run.state_dict() | {"ema": None}, BEST)',
         "best.pt holds the averaged weights", "tests/test_imagenet.py -k averaged_weights_are"),
        ("            run.scaler.unscale_(optimizer)\n", "",
         "--clip-grad is for gradients that are not scaled",
         "tests/test_imagenet.py -k plain_pytorch"),
        ("d = setup_distributed(timeout=timeout)", "d = setup_distributed()",
         "--timeout ends the training",
         "tests/test_timeouts.py -k both_groups"),
        ('dist.new_group(backend="gloo", timeout=timeout)', 'dist.new_group(backend="gloo")',
         "--timeout ends the votes", "tests/test_timeouts.py -k both_groups"),
    ),
    *mutants("common/data.py",
        ("draw(1, torch.arange(10_000))", "draw(0, torch.arange(10_000))", "test images are not training images",
         "tests/test_shapes.py -k seed_of_its_own"),
        ("torch.randint(2 * padding + 1, (2, n), device=device)",
         "torch.randint(2 * padding + 1, (2, 1), device=device).expand(2, n)", "each image is cropped in its own way",
         "tests/test_data.py -k offset"),
        ("multiprocessing_context=START_METHOD", "multiprocessing_context=None", "workers end with a killed training",
         "tests/test_data.py::test_loader_workers_end_with_a_killed_rank[01_snsc.py]"),
        ('flip = 0 if args.dataset == "mnist" else 0.5', "flip = 0.5", "digits are not mirrored",
         "tests/test_data.py -k digits"),
        ("drop_last = train and len(sampler) % args.batch_size == 1", "drop_last = False", "no batch of one image",
         "tests/test_data.py -k batch_of_one"),
        ("return (images / std).sub_(mean / std)", "return images / std", "input has mean 0",
         "tests/test_data.py -k norm"),
        ("train_set.image_size[0] // 8 if", "4 if", "the border of a crop follows the size",
         "tests/test_data.py -k border"),
    ),
    *mutants("common/models.py",
        ("stem.stride, stem.padding", "1, stem.padding", "a grey stem keeps its stride",
         "tests/test_models.py -k stem"),
        ("stride=2, padding=1, bias=False", "stride=1, padding=1, bias=False",
         "small_net ends in one value per channel", "tests/test_models.py"),
        ('{"aux_logits": False, "init_weights": True}', "{}", "models with two outputs train", "tests/test_models.py"),
        ("return model.train()", "return model", "a built model is in training mode", "tests/test_models.py"),
        ("nn.Linear(64 * height * width, 128), nn.ReLU(),", "nn.Linear(64 * height * width, 128),",
         "MnistNet is the model of the examples", "tests/test_models.py -k written_out"),
    ),
    *mutants("common/syncbn.py",
        ("variance * total / (total - 1), share)", "variance, share)", "the running variance is unbiased",
         "tests/test_sync_bn.py"),
        ("        return SumOverRanks.forward(ctx, gradient)", "        return gradient",
         "gradients flow to every rank", "tests/test_sync_bn.py"),
        ("total = sums[-1].detach()", "total = sums.new_tensor(count * dist.get_world_size())",
         "ranks may hold different numbers of images", "tests/test_sync_bn.py"),
        ("return new.train(norm.training)", "return new", "a frozen norm stays frozen", "tests/test_sync_bn.py"),
        ("type(module) not in PLAIN:", "False:", "a norm that does more is refused",
         "tests/test_gpus.py -k batch_norm"),
    ),
    *mutants("common/distributed.py",
        ("    total = tensor.clone()\n", "    total = tensor\n",
         "sum_over_ranks leaves its argument alone", "tests/test_distributed.py -k new_tensor"),
        ('"MPI_LOCALRANKID" not in environment and "SLURM_STEP_NUM_TASKS" in environment', "False",
         "srun with PMI is srun", "tests/test_distributed.py -k recognised"),
        ('return counts[read_number(environment, SRUN, "SLURM_NODEID", 0, len(counts) - 1)]',
         "return counts[0]", "uneven tasks per node", "tests/test_distributed.py -k recognised"),
        ("torch.device(kind, 0 if is_own else local_rank)", "torch.device(kind, local_rank)",
         "a task with its own GPU", "tests/test_distributed.py -k gpu"),
        ("    if count > local_world_size == 1 and is_task", "    if False and is_task",
         "no idle GPUs in silence", "tests/test_distributed.py -k slurm_task"),
        ('if store.add(f"claims to {thing}", 1) == 1:', 'if store.add(f"claims to {thing}", 1):',
         "a rank that is there twice is named", "tests/test_distributed.py -k twice"),
        ("    if found_job != job:\n", "    if False:\n",
         "two jobs do not merge", "tests/test_distributed.py -k merge"),
        ("        gc.collect()", "        pass",
         "no thread outlives the group", "tests/test_launch.py -k no_thread"),
        ("PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else 29500", "29500",
         "jobs get ports of their own", "tests/test_distributed.py -k recognised"),
        ("    set_variables(ranks, address, environment)\n", "",
         "torchrun's variables are set", "tests/test_distributed.py -k variables_of_torchrun"),
        ('environment.get("MASTER_PORT") or free_port()',
         'environment.get("MASTER_PORT", free_port())',
         "under torchrun no port is tried", "tests/test_distributed.py -k no_port"),
        ("        local_world_size //= tasks  # processes within one task\n", "",
         "torchrun in a task has all its cores", "tests/test_distributed.py -k cores"),
        ("if not is_busy and time", "if time",
         "a name server may be busy", "tests/test_distributed.py -k busy"),
        ("    store.set_timeout(timeout)\n    return store\n", "    return store\n",
         "a collective has the timeout of the job", "tests/test_distributed.py -k store_has"),
        ("backend=backend, timeout=timeout,", "backend=backend,",
         "a peer that stops ends the job", "tests/test_timeouts.py -k setup_distributed"),
        ("is_main = property(lambda self: self.rank == 0)",
         "is_main = property(lambda self: self.local_rank == 0)",
         "rank 0 alone prints and saves", "tests/test_distributed.py -k is_main"),
    ),
    *mutants("common/errors.py",
        ('rpartition("UserError: ")[-1], 2', 'rpartition("UserError: ")[-1], 1', "a mistake is exit code 2",
         "tests/test_scripts.py -k mistake"),
        ('_exit_now("stopped by Ctrl-C", 130)', '_exit_now("stopped by Ctrl-C", 0)', "Ctrl-C is exit code 130",
         "tests/test_launch.py -k ctrl_c"),
        ('from_nccl = isinstance(error, RuntimeError) and "NCCL" in text', "from_nccl = False",
         "a lost peer of NCCL is one line", "tests/test_gpus.py -k loss_of_a_peer"),
        ("        child.kill()", "        pass", "no process is left", "tests/test_scripts.py -k ctrl_c"),
    ),
    *mutants("common/images.py",
        ("return train, val or test", "return train, test or val",
         "the test set is val/", "tests/test_data.py -k val_serves"),
        ("(58.395, 57.12, 57.375)", "(50.0, 57.12, 57.375)", "ImageNet's deviation",
         "tests/test_data.py -k imagenets"),
        ("(123.675, 116.28, 103.53)", "(123.675, 116.28, 100.0)", "ImageNet's mean",
         "tests/test_imagenet.py -k torchvisions_published"),
        ("lambda level: level / 256", "lambda level: level", "16 bits per pixel",
         "tests/test_data.py -k kind"),
    ),
    *mutants("common/memory.py",
        ("torch.randperm(n, generator=torch.Generator().manual_seed(0))[:limit]", "torch.arange(n)[:limit]",
         "--limit takes images of all classes", "tests/test_data.py -k limit"),
        ("variance.clamp(min=1).sqrt()", "variance.sqrt()",
         "a channel of one level is no division by zero", "tests/test_data.py -k one_level"),
    ),
    *mutants("common/folder.py",
        ("chosen = choose(len(train), args.limit)",
         "chosen = choose(len(train), None)[: args.limit]", "--limit takes images of all classes",
         "tests/test_data.py -k limit"),
        ("Photographs(test_root, random_crops=False)", "Photographs(test_root, random_crops=True)",
         "evaluation sees the center", "tests/test_data.py -k centre"),
        ("v2.Resize(CROP * 8 // 7)", "v2.Resize(CROP)", "evaluation as published",
         "tests/test_data.py -k centre"),
    ),
    *mutants("common/report.py",
        ('(images - start[1]) * self.record["world_size"] / (now', "(images - start[1]) / (now", "img/s of all ranks",
         "tests/test_report.py -k world"),
        ("        synchronize(self.device)\n        return time", "        return time", "times of a GPU are true",
         "tests/test_report.py -k synchronised"),
        ("100 * float(correct) / self.test_images", "100 * float(correct) / self.images", "accuracy of the test set",
         "tests/test_report.py"),
        ("self.totals = [a + b for a, b in zip(self.totals, new, strict=True)]", "self.totals = new",
         "means over the epoch", "tests/test_scripts.py -k plain_pytorch"),
        ("if self.args.log_file and self.rank == 0:", "if self.args.log_file:", "only rank 0 writes",
         "tests/test_report.py -k rank_0"),
        ("        dist.all_gather_object(\n            everyone,", "        everyone[0] = (", "every host has a line",
         "tests/test_report.py -k hosts_have"),
        ('len({r["started"] for r in map(json.loads, file) if r["command"] == command})',
         'len([r for r in map(json.loads, file) if r["command"] == command])',
         "`repeat` counts runs, not epochs",
         "tests/test_report.py -k repeats"),
    ),
    *mutants("common/shapes.py",
        ("TURN = 6", "TURN = 7", "the bytes of an image never change", "tests/test_shapes.py -k bytes"),
        ("swap = np.stack([draw(11 + c, 2)", "swap = np.stack([0 * draw(11 + c, 2)",
         "brightness does not tell the class", "tests/test_shapes.py"),
    ),
    *mutants("common/flags.py",
        ('name and copies[name] > 1 and rank == "0"', "name and copies[name] > 1", "one warning, from rank 0",
         "tests/test_launch.py -k copies"),
        ('default="linear",', 'default="none",', "the rate follows the batch",
         "tests/test_scripts.py -k learning_rate_follows"),
        ("self.exit(2, f", "self.exit(1, f", "a mistake is exit code 2", "tests/test_scripts.py -k mistake"),
    ),
    *mutants("common/ddp_flags.py",
        ("        if count > args.nodes:\n", "        if False:\n", "04 is not started by a launcher",
         "tests/test_launch.py -k refuses"),
        ("if args.node_rank > (last := args.nodes - 1):", "if (last := args.nodes - 1) < 0:", "a node rank fits",
         "tests/test_launch.py -k refuses"),
    ),
    *mutants("imagenet/datasets.py",
        ("v2.Resize(size * 8 // 7)", "v2.Resize(size)", "evaluation as published",
         "tests/test_imagenet.py -k torchvisions_published"),
        ("hash((self.seed, epoch, index))", "hash((self.seed, index))", "other crops in each epoch",
         "tests/test_imagenet.py -k crop"),
        ("targets[k] = self.targets[used]", "targets[k] = self.targets[index]",
         "a replaced image has its own target", "tests/test_imagenet.py -k damaged"),
        ("val = val or val_split", "val = val_split", "--val-path",
         "tests/test_imagenet.py -k val_path"),
    ),
    *mutants("imagenet/loader.py",
        ("multiprocessing_context=START_METHOD", "multiprocessing_context=None",
         "workers end with a killed training",
         "tests/test_data.py::test_loader_workers_end_with_a_killed_rank[06_imagenet.py]"),
        ("cores = cores_per_process(local_world_size)", "cores = cores_per_process(1)",
         "ranks of a machine share its cores", "tests/test_gpus.py -k loader_workers"),
        ("if len(self.known) > MAX_DAMAGED * len(self.dataset):", "if False:",
         "too many damaged images end the run", "tests/test_imagenet.py -k damaged"),
    ),
    *mutants("imagenet/elastic.py",
        ("manual_seed(self.seed + self.epoch)", "manual_seed(self.seed)", "another order in each epoch",
         "tests/test_imagenet.py -k order_changes"),
        ("return count * piece // pieces", "return count // pieces * piece", "every image once",
         "tests/test_imagenet.py -k any_world"),
        ("self.stop, self.save = self.stop or bool(stop), self.save or bool(save)",
         "self.stop, self.save = bool(stop), bool(save)", "a wish between votes is heard", "tests/test_votes.py"),
        ("torch.tensor([self.stop, self.save, step_seconds]), now", "torch.tensor([self.stop, 0, step_seconds]), now",
         "a wish to save is heard", "tests/test_votes.py"),
        ("self.ballot, dist.ReduceOp.MAX", "self.ballot, dist.ReduceOp.SUM",
         "the slowest rank decides on `every`",
         "tests/test_votes.py -k slowest"),
        ("shortest, dist.ReduceOp.MAX", "shortest, dist.ReduceOp.SUM",
         "a vote costs what the slowest rank needs",
         "tests/test_votes.py -k slowest"),
        ("    if not resume:\n", "    if False:\n", "restarts without --resume are refused",
         "tests/test_troubleshooting.py -k restarts_without"),
        ('while launcher == "torchrun" and signals.stop.signal is None', "while False",
         "a worker waits for torchrun's signal", "tests/test_imagenet.py -k waits_for_the_signal"),
    ),
    *mutants("imagenet/checkpoint.py",
        ("return any(self._gather(self.reads and bool(self._newest_first())))",
         "return self.reads and bool(self._newest_first())", "all ranks refuse a second run",
         "tests/test_imagenet.py -k second_run"),
        ('temporary = os.path.join(folder, f".{name}.{socket.gethostname()}.{os.getpid()}.tmp")', "temporary = path",
         "a file with the right name is complete", "tests/test_checkpoint.py -k killed"),
        ("if trailer[len(MARK) :] != hashlib.sha256(body).hexdigest().encode():", "if False:",
         "the checksum finds damage", "tests/test_checkpoint.py -k damaged"),
        ('io.BytesIO(body), map_location="cpu", weights_only=True',
         'io.BytesIO(body), map_location="cpu", weights_only=False', "a checkpoint runs no code",
         "tests/test_checkpoint.py -k damaged"),
        ('detach().to("cpu", copy=True)', 'detach().to("cpu")', "training may change its weights at once",
         "tests/test_checkpoint.py -k change_its_weights"),
        ("older[self.keep - 1 :]", "older[self.keep :]", "--keep", "tests/test_checkpoint.py -k newest_few"),
        ("key=_step_of, reverse=True", "key=_step_of", "the newest one is used", "tests/test_checkpoint.py"),
        ("return self.rank == 0 or (local_rank == 0 and not shared)", "return self.rank == 0",
         "every machine keeps all", "tests/test_imagenet.py -k without_a_shared"),
    ),
    *mutants("imagenet/resume.py",
        ('state and state["flags"].get("accumulate") in (None, str(args.accumulate))', "state",
         "--accumulate may change", "tests/test_imagenet.py -k cuts_batches"),
        ('"image_size", "seed", "ema"', '"image_size", "ema"', "another seed is another run",
         "tests/test_imagenet.py -k refused"),
        ("least = 2 if batch_norm and not synchronized else 1", "least = 1", "batch norm needs two images",
         "tests/test_imagenet.py -k cannot_train"),
    ),
    *mutants("imagenet/signals.py",
        ("    if not stop.training:\n        sys.exit(EXIT_REQUEUE)\n", "", "a signal before training ends the process",
         "tests/test_imagenet.py -k before_training"),
        ("EXIT_REQUEUE = 75", "EXIT_REQUEUE = 0", "Slurm queues the job again", "tests/test_imagenet.py -k imported"),
    ),
    *mutants("imagenet/finetune.py",
        ("            module.eval()\n", "            pass\n", "frozen batch norm does not move",
         "tests/test_finetune.py"),
        ("parameters[name].requires_grad_(False)", "parameters[name].requires_grad_(True)", "--freeze",
         "tests/test_finetune.py"),
        ('r"(?!\\d)"', 'r""', "--freeze 1 is not 17", "tests/test_finetune.py"),
    ),
    *mutants("imagenet/model.py",
        ("weights = [p for p in trained if p.ndim > 1]", "weights = [p for p in trained if p.ndim > 0]",
         "norms and biases do not decay", "tests/test_imagenet.py -k decay"),
        ("1 if first else 1 - self.decay", "1 if first else self.decay", "--ema", "tests/test_gpus.py -k averaged"),
        ("            mine.copy_(current)\n", "            pass\n", "counters of batch norm",
         "tests/test_gpus.py -k averaged"),
    ),
    *mutants("imagenet/progress.py",
        ("(self.args.epochs * self.steps - steps_done) * seconds_per_step", "self.steps * seconds_per_step",
         "time left of the whole training", "tests/test_imagenet.py -k by_hand"),
        ('"test_acc": round(top1, 3), "test_top5": round(top5, 3)',
         '"test_acc": round(top5, 3), "test_top5": round(top5, 3)', "recorded top-1",
         "tests/test_imagenet.py -k what_a_run_tells"),
        ('"train_acc": round(100 * self.totals[1]', '"train_acc": round(100 * self.totals[2]',
         "train_acc is top-1",
         "tests/test_imagenet.py -k plain_pytorch"),
    ),
    *mutants("imagenet/flags.py",
        ('if args.amp == "fp16" and not torch', "if False and not torch", "fp16 needs a GPU",
         "tests/test_imagenet.py -k wrong_flag"),
    ),
    *mutants("template/train.py",
        ('options["multiprocessing_context"] = "fork"', "pass", "workers end with a killed training",
         "tests/test_data.py::test_loader_workers_end_with_a_killed_rank[template/train.py]"),
        ("        sampler.set_epoch(epoch)", "        epoch", "another order in each epoch",
         "tests/test_template.py -k order_of_its_own"),
        ("    dist.all_reduce(totals)\n", "", "numbers of all processes", "tests/test_template.py -k two_processes"),
        ("last_epoch=first - 1", "last_epoch=-1", "a resumed run goes on in its schedule",
         "tests/test_template.py -k same_bits"),
        ('        optimizer.load_state_dict(state["optimizer"])\n', "", "the same bits on resume",
         "tests/test_template.py -k same_bits"),
        ("range(d.rank, len(part), d.world_size)", "range(d.rank, len(part) - 2, d.world_size)", "every example counts",
         "tests/test_template.py -k counts_once"),
        ("        if epoch + 1 == args.epochs or (args", "        if (args", "the last epoch is saved",
         "tests/test_template.py -k counts_once"),
        ("    if not len(train_loader):", "    if False:", "no training without a batch",
         "tests/test_template.py -k larger_than"),
        ("if accuracy > best:", "if accuracy < best:", "best.pt is the best",
         "tests/test_template.py -k two_processes"),
        ('        torch.save(state, path + ".new")\n        os.replace(path + ".new", path)\n',
         "        torch.save(state, path)\n", "a kill leaves a whole last.pt",
         "tests/test_template.py -k kill_while"),
    ),
    *mutants("launch/preflight.py",
        ("        if len(claims) > 1:\n", "        if False:\n", "a rank that is there twice is named",
         "tests/test_preflight.py -k twice"),
        ("        if gpus > len(ranks) and gpus > 1:", "        if False:", "idle GPUs are named",
         "tests/test_preflight.py -k idle"),
        ("return size / seconds * 2 * (world_size - 1) / world_size", "return size / seconds",
         "bus bandwidth as others count it", "tests/test_preflight.py -k bandwidth"),
        ("if abs(ahead) > CLOCKS:", "if ahead > CLOCKS:", "a clock that is behind is named",
         "tests/test_preflight.py -k clock_that"),
        ("key=lambda item: abs(item[1])", "key=lambda item: item[1]", "the worst clock is named",
         "tests/test_preflight.py -k clock_that"),
        ('        "timeout": datetime.timedelta(seconds=3 * SILENCE),\n', "",
         "all_reduce ends without a peer",
         "tests/test_timeouts.py -k preflight"),
    ),
    *mutants("tools/prepare_imagenet.py",
        ("target, args.short_side, args.quality)", "target, args.short_side, 90)", "--quality",
         "tests/test_prepare.py -k quality"),
    ),
    *mutants("launch/sensecore.sh",
        ('--node-rank="$RANK"', "--node-rank=0", "each machine has its rank",
         "tests/test_launch_files.py -k sensecore"),
        ("-d AllReduce", "", "the message says how to submit", "tests/test_launch_files.py -k sensecore"),
    ),
    *mutants("launch/mpirun.sh",
        ("--bind-to none ", "", "processes use all cores of their share", "tests/test_launch_files.py -k all_cores"),
    ),
    *mutants("launch/06_elastic.sh",
        ("    if ((left-- == 0)); then", "    if ((left == -1)); then", "a job that cannot run ends",
         "tests/test_drill.py -k limited"),
    ),
    *mutants("launch/store.py",
        ('        fail(\n            f"port {port}: {error.strerror}',
         '        print(\n            f"port {port}: {error.strerror}',
         "a port that is taken is one line", "tests/test_drill.py -k second_store"),
    ),
    *mutants("launch/slurm/03_torchrun.sbatch",
        ("processes=${SLURM_GPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}", "processes=$SLURM_CPUS_PER_TASK",
         "a process per GPU", "tests/test_slurm.py -k lines_for_gpus"),
    ),
]
# fmt: on


def check(mutants):
    """Raise UserError if a mutant no longer fits its file."""
    for mutant in mutants:
        if (count := (ROOT / mutant.file).read_text().count(mutant.before)) != 1:
            raise UserError(
                f"{mutant.file}: {mutant.before!r} is there {count} times: expected once; mend the mutant"
            )


def try_mutant(copy, mutant):
    """Return the test that noticed a mutant, or None, and the seconds it took."""
    start = time.monotonic()
    text = (copy / mutant.file).read_text().replace(mutant.before, mutant.after)
    failed = trial.run_tests_on(copy, mutant.file, text, mutant.tests.split(), PATIENCE)
    return failed and failed.rpartition("::")[2], time.monotonic() - start


def parse_args():
    parser = Parser(__doc__)
    parser.add_argument(
        "files", nargs="*", metavar="TEXT", help="mutants of files whose name contains it"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants")
    parser.add_argument(
        "--jobs", type=whole_number(1), default=2, metavar="N", help="copies that run side by side"
    )
    return parser.parse_args()


def main(args):
    chosen = [m for m in MUTANTS if not args.files or any(text in m.file for text in args.files)]
    check(chosen)
    if args.list:
        for mutant in chosen:
            print(f"{mutant.file:32} {mutant.breaks}")
        return
    survivors = []
    trial.import_what_tests_need()
    with tempfile.TemporaryDirectory() as folder:
        for mutant, (noticed, seconds) in trial.run_all(try_mutant, chosen, args.jobs, folder):
            promise = f"{mutant.file:32} {mutant.breaks:48}"
            print(f"{promise} {seconds:4.0f} s  {noticed or 'SURVIVED'}", flush=True)
            survivors += [mutant] * (noticed is None)
    if survivors:
        raise UserError(
            f"{len(survivors)} of {len(chosen)} mutants survived: write a test for each"
        )
    print(f"all {len(chosen)} mutants were noticed")


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
