"""The flags of other trainings, and what they are here: (theirs, ours). A test parses ours."""

DISTRIBUUUU = [
    ("`--cfg config/resnet18.yaml`", "@recipes/resnet18.args"),
    ("`MODEL.ARCH resnet50`", "--arch resnet50"),
    ("`MODEL.SYNCBN True`", "--sync-bn"),
    ("`TRAIN.DATASET ./data/ILSVRC`", "data/ILSVRC"),
    ("`TRAIN.BATCH_SIZE 128` on 64 GPUs: images per GPU", "--batch-size 8192"),
    ("`OPTIM.BASE_LR 6.4` with 8192 images per step: used as it is", "--lr 0.2"),
    ("`OPTIM.MAX_EPOCH 100`", "--epochs 100"),
    ("`OPTIM.LR_POLICY cos`", "--schedule cosine"),
    ("`OPTIM.WARMUP_EPOCHS 5`, `OPTIM.WARMUP_FACTOR 0.1`", "--warmup-epochs 5 --warmup-factor 0.1"),
    ("`OPTIM.WEIGHT_DECAY 5e-5`", "--weight-decay 5e-5"),
    ("`TRAIN.IM_SIZE 224`", "--image-size 224"),
    ("`TRAIN.WORKERS 4`", "--workers 4"),
    ("`OUT_DIR ./resnet18`", "--checkpoints-path ./resnet18"),
]
WZMIAOMIAO = [
    ("`--data-path flower_photos`: split by the script", "data/flowers"),
    ("`--num_classes 5`", ""),
    ("`--batch-size 16` on 8 GPUs: images per GPU", "--batch-size 128"),
    ("`--lr 0.001`: multiplied by the number of GPUs, whatever `--batch-size` is", "--lr 0.016"),
    ("`--syncBN True`", "--sync-bn"),
    ("`--weights resNet34.pth`", "--arch resnet34 --weights resNet34.pth --new-head"),
    ("`--freeze-layers True`: all but the last layer", "--freeze conv1,bn1,layer"),
]
EXAMPLES = [
    ("`-a resnet50`", "--arch resnet50"),
    ("`-b 256`: images of all GPUs of a machine", "--batch-size 256"),
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
    ("`-e --pretrained`", "--evaluate --weights torchvision:DEFAULT"),
]
TIMM = [
    ("`--model resnet50`", "--arch timm:resnet50"),
    ("`-b 128` on 8 GPUs: images per GPU", "--batch-size 1024"),
    ("`--lr-base 0.1 --lr-base-size 256`", "--lr 0.1"),
    ("`--sched cosine --warmup-epochs 5`", "--schedule cosine --warmup-epochs 5"),
    ("`--amp --amp-dtype bfloat16`", "--amp bf16"),
    ("`--channels-last`, `--torchcompile`", "--channels-last --compile"),
    ("`--model-ema --model-ema-decay 0.9999`", "--ema 0.9999"),
    ("`--smoothing 0.1`", "--label-smoothing 0.1"),
    ("`--clip-grad 1.0`", "--clip-grad 1.0"),
    ("`--grad-accum-steps 2`", "--accumulate 2"),
    ("`--sync-bn`", "--sync-bn"),
    ("`--initial-checkpoint FILE`", "--weights FILE"),
    ("`--output DIR`, `--checkpoint-hist 10`", "--checkpoints-path DIR --keep 10"),
    ("`--log-interval 50`", "--print-every 50"),
]
FLAGS = {
    "distribuuuu": DISTRIBUUUU,
    "WZMIAOMIAO": WZMIAOMIAO,
    "pytorch/examples": EXAMPLES,
    "timm": TIMM,
}

# What each flag of torchrun is for, in our words. A test compares the names with those of
# torchrun's own parser.
TORCHRUN = {
    "--nnodes": "number of machines, 2; or from the fewest to the most, 1:4",
    "--nproc-per-node": "processes per machine: a number, gpu, cpu, xpu, or auto",
    "--node-rank": "number of this machine, from 0; only for a fixed number of machines",
    "--master-addr": "name or address of machine 0; only for a fixed number of machines",
    "--master-port": "port on machine 0, 29500 unless given; only for a fixed number of machines",
    "--standalone": "one machine, and a free port: for several jobs on one machine",
    "--rdzv-backend": (
        "how machines find each other: "
        "static (with --node-rank) or c10d (machines may join and exit)"
    ),
    "--rdzv-endpoint": "HOST:PORT of the store of the rendezvous",
    "--rdzv-id": "name of the job, the same on all machines and different for each job",
    "--rdzv-conf": "settings of the rendezvous: is_host=1, join_timeout=600",
    "--max-restarts": "how often torchrun restarts all processes after a failure",
    "--monitor-interval": "seconds between two checks of the processes",
    "--start-method": (
        "how Python starts processes: spawn, fork or forkserver; scripts are unaffected"
    ),
    "--role": "a name for these processes in messages",
    "--module": "start a module, as python -m does: torchrun --module package.train",
    "--no-python": "start a program that is not a Python script",
    "--run-path": "run the script within the interpreter of the worker, from its absolute path",
    "--log-dir": "folder for the output of each process",
    "--redirects": (
        "write output to files instead of the terminal: "
        "3 is both streams of all, 1:3 those of local rank 1"
    ),
    "--tee": "write output to files and to the terminal; values as for --redirects",
    "--log-line-prefix-template": "prefix of each line of --tee: '${hostname}:${rank}: '",
    "--local-ranks-filter": "show only the output of these local ranks: 0,1",
    "--local-addr": (
        "address of this machine, if its name does not resolve to one that others reach"
    ),
    "--numa-binding": "bind processes to the cores near their GPU",
    "--signals-to-handle": "signals that torchrun forwards to the processes",
    "--shutdown-timeout": "seconds from SIGTERM to SIGKILL, 30 unless given",
    "--virtual-local-rank": "each process sees one GPU and local rank 0",
    "--event-log-handler": "for developers of launchers: where events go",
    "--logs-specs": "for developers of launchers: a class that decides where output goes",
    "--duplicate-stdout-filters": (
        "copy lines of standard output that contain these words to a file"
    ),
    "--duplicate-stderr-filters": "the same for standard error",
}
