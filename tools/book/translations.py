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
    ("divided by 10 every 30 epochs, no warm-up", "--schedule step --step-epochs 30 --warmup-epochs 0"),
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
FLAGS = {"distribuuuu": DISTRIBUUUU, "WZMIAOMIAO": WZMIAOMIAO, "pytorch/examples": EXAMPLES, "timm": TIMM}
