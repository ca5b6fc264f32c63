"""What people type who come from other trainings, and what to type here: for errors and the book.

Each row is (theirs, ours). What is typed there stands between backquotes; the other words say how
it it differs. `ours` are flags, which the tests parse, or begin with "nothing: " or "no flag: ".
"""

import re

DISTRIBUUUU = [
    ("`--cfg config/resnet18.yaml`", "@recipes/resnet18.args"),
    ("`MODEL.ARCH resnet50`", "--arch resnet50"),
    ("`MODEL.SYNCBN True`", "--sync-bn"),
    ("`TRAIN.DATASET ./data/ILSVRC`", "data/ILSVRC"),
    ("`TRAIN.BATCH_SIZE 128` on 64 GPUs: images per GPU", "--batch-size 8192"),
    ("`OPTIM.BASE_LR 6.4` with 8192 images per step: used as it is", "--lr 0.2"),
    ("`OPTIM.MAX_EPOCH 100`", "--epochs 100"),
    ("`OPTIM.LR_POLICY cos`", "--schedule cosine"),
    ("`OPTIM.WARMUP_EPOCHS 5`", "--warmup-epochs 5"),
    ("`OPTIM.WARMUP_FACTOR 0.1`", "--warmup-factor 0.1"),
    ("`OPTIM.WEIGHT_DECAY 5e-5`", "--weight-decay 5e-5"),
    ("`TRAIN.IM_SIZE 224`", "--image-size 224"),
    ("`TRAIN.WORKERS 4`", "--workers 4"),
    ("`TRAIN.PRINT_FREQ 30`", "--print-every 30"),
    ("`OUT_DIR ./resnet18`", "--checkpoints-path ./resnet18"),
]
WZMIAOMIAO = [
    ("`--data-path data/flowers`: in WZMIAOMIAO, split by the script", "data/flowers"),
    ("`--num_classes 5`", "nothing: the folders say it"),
    ("`--lrf 0.1`", "--final-lr 0.1"),
    ("`--batch-size 16` on 8 GPUs: images per GPU", "--batch-size 128"),
    ("`--lr 0.001`: multiplied by the number of GPUs, whatever `--batch-size` is", "--lr 0.016"),
    ("`--syncBN True`", "--sync-bn"),
    ("`--weights resNet34.pth`", "--arch resnet34 --weights resNet34.pth --new-head"),
    ("`--freeze-layers True`: all but the last layer", "--freeze conv1,bn1,layer"),
]
EXAMPLES = [
    ("`-a resnet50`", "--arch resnet50"),
    (
        "`-b 256`: images of all GPUs of a machine; in timm and torchvision, of one GPU",
        "--batch-size 256",
    ),
    ("`--lr 0.1`: used as it is, whatever `-b` is", "--lr 0.1"),
    (
        "divided by 10 every 30 epochs, no warm-up",
        "--schedule step --step-epochs 30 --warmup-epochs 0",
    ),
    ("`--wd 1e-4`", "--weight-decay 1e-4"),
    ("`-j 4`", "--workers 4"),
    ("`-p 10`", "--print-every 10"),
    ("`--resume checkpoint.pth.tar`", "--resume"),
    ("`--pretrained`", "--weights torchvision:DEFAULT"),
    ("`-e`", "--evaluate --resume"),
    ("`--checkpoint-file FILE`, in the elastic example", "--checkpoints-path DIR --resume"),
    ("`--dist-backend nccl`", "nothing: the device says it"),
    ("`--multiprocessing-distributed`", "nothing: torchrun starts the processes"),
]
TIMM = [
    ("`--model resnet50`", "--arch timm:resnet50"),
    ("`-b 128` on 8 GPUs: images per GPU", "--batch-size 1024"),
    ("`--lr-base 0.1`", "--lr 0.1"),
    ("`--lr-base-size 256`", "nothing: always 256"),
    ("`--sched cosine`", "--schedule cosine"),
    ("`--amp-dtype bfloat16`", "--amp bf16"),
    ("`--torchcompile`", "--compile"),
    ("`--model-ema-decay 0.9999`", "--ema 0.9999"),
    ("`--smoothing 0.1`", "--label-smoothing 0.1"),
    ("`--grad-accum-steps 2`", "--accumulate 2"),
    ("`--initial-checkpoint FILE`", "--weights FILE"),
    ("`--output DIR`", "--checkpoints-path DIR"),
    ("`--checkpoint-hist 10`", "--keep 10"),
    ("`--log-interval 50`", "--print-every 50"),
]
TORCHVISION = [
    ("`--data-path data/imagenet`", "data/imagenet"),
    ("`--model resnet50`", "--arch resnet50"),
    ("`-b 32` on 8 GPUs: images per GPU", "--batch-size 256"),
    ("`--test-only`", "--evaluate --resume"),
    ("`--lr-scheduler cosineannealinglr`", "--schedule cosine"),
    ("`--lr-warmup-epochs 5`", "--warmup-epochs 5"),
    ("`--model-ema`", "--ema 0.9999"),
    ("`--train-crop-size 224`", "--image-size 224"),
    ("`--output-dir DIR`", "--checkpoints-path DIR"),
    ("`--print-freq 10`", "--print-every 10"),
]
# For 06. An error takes the first row with what was typed.
OF_06 = {
    "distribuuuu": DISTRIBUUUU,
    "WZMIAOMIAO": WZMIAOMIAO,
    "pytorch/examples": EXAMPLES,
    "torchvision": TORCHVISION,
    "timm": TIMM,
}

MNIST = [
    ("`--log-interval 10`", "--print-every 10"),
    ("`--save-model`", "--save mnist.pt"),
    ("`--dry-run`", "--epochs 1 --limit 64"),
    ("`--test-batch-size 1000`", "nothing: as large as --batch-size"),
    ("`--gamma 0.7`: the learning rate falls", "nothing: the learning rate stays the same"),
    ("`--no-cuda`", "no flag: set CUDA_VISIBLE_DEVICES= before the command"),
    ("`--no-accel`", "no flag: set CUDA_VISIBLE_DEVICES= before the command"),
]
COURSE = [
    ("`-a resnet18`", "--arch resnet18"),
    ("`-b 256`", "--batch-size 256"),
    ("`-j 4`", "--workers 4"),
    ("`-p 10`", "--print-every 10"),
    ("`--device cuda`", "nothing: a GPU is used if there is one"),
    ("`--gpu 0`", "no flag: set CUDA_VISIBLE_DEVICES=0 before the command"),
    ("`--num_classes 10`", "nothing: the folders say it"),
    ("`--data-path DIR`", "--dataset folder --data-dir DIR"),
]
OF_01_TO_05 = {"MNIST examples": MNIST, "courses": COURSE}

SYNC_BN = [("`--syncBN True`", "--sync-bn")]
OF_03_TO_05 = OF_01_TO_05 | {"SyncBN": SYNC_BN}

SPAWN = [
    ("`--ngpus_per_node 2`", "--nproc-per-node 2"),
    ("`--world-size 2`: machines; in WZMIAOMIAO, processes", "--nodes 2"),
    ("`--nnodes 2`", "--nodes 2"),
    ("`--rank 0`: of the machine", "--node-rank 0"),
    ("`-n 2`: machines", "--nodes 2"),
    ("`-g 4`: GPUs of each", "--nproc-per-node 4"),
    ("`-nr 0`", "--node-rank 0"),
    ("`--master-addr HOST`", "--dist-url tcp://HOST:PORT"),
]
OF_04 = OF_03_TO_05 | {"mp.spawn": SPAWN}


def is_prose(ours):
    """Return whether there is no flag for it here, and a row says why or what to do."""
    return ours.startswith(("nothing: ", "no flag: "))


def dashed(word):
    """Return a word of a command line with - for _ in the name of its flag: --batch_size=8."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def typed(theirs):
    """Return what a row says is typed there: a list of lists of words."""
    return [[dashed(word) for word in text.split()] for text in re.findall("`(.+?)`", theirs)]


def hints(words, others, known):
    """Return what to type here for words that others take: a list of str.

    Args:
        words: list of str, a command line.
        others: {name of a training: its rows}.
        known: flags that the script has itself.
    """
    found = []
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if not value and place + 1 < len(words) and not words[place + 1].startswith("-"):
            value = words[place + 1]
        row = None if name in known else find_row(name, others)
        if row:
            found.append(hint(name, value, *row))
    return found


def find_row(name, others):
    """Return the first row with this name of a flag, or None."""
    for rows in others.values():
        for row in rows:
            if any(name == words[0] for words in typed(row[0])):
                return row
    return None


def hint(name, value, theirs, ours):
    """Return what to type here for one flag, with its value."""
    example = next(words for words in typed(theirs) if words[0] == name)
    note = re.sub("`.+?`", "", theirs, count=1).strip(" :,")
    note = f" (there {note})" if note else ""
    if len(example) == 1:
        value = ""
    elif value and example[1] in ours.split() and not is_prose(ours):
        ours = " ".join(value if word == example[1] else word for word in ours.split())
    elif value and value != example[1] and not is_prose(ours):
        note = f" for {' '.join(example)}{note}"
    return f"{name}{value and ' ' + value}: here {ours}{note}"
